#!/bin/bash
# Written by: choros submit --on spark --master spark://head:7077 --nodes 2 --ranks-per-node 4 --cores 8 --python python --env 'A=b c' --gpus 1 train.py --epochs 3
export A='b c'
exec spark-submit --master spark://head:7077 --name train \
    --conf spark.dynamicAllocation.enabled=false \
    --conf spark.scheduler.barrier.maxConcurrentTasksCheck.interval=1s \
    --conf spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures=30 \
    --conf spark.executor.cores=32 \
    --conf spark.task.cpus=8 \
    --conf spark.cores.max=64 \
    --conf spark.executor.resource.gpu.amount=4 \
    --conf spark.task.resource.gpu.amount=1 \
    --conf spark.pyspark.python=python \
    --conf 'spark.executorEnv.A=b c' \
    train.py --epochs 3
