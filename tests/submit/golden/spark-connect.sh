#!/bin/bash
# Written by: choros submit --on spark --master sc://head:15002 --python python --env A=b train.py --epochs 3
export A=b
SPARK_REMOTE=sc://head:15002 exec python train.py --epochs 3
