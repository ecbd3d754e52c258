#!/bin/bash
# Written by: choros submit --on spark --master yarn --nodes 3 --cores 4 --queue long --python python --archive env.tar.gz -o '--deploy-mode client' -o '--conf spark.executor.memory=8g' --setup 'module load conda' train.py --epochs 3
module load conda
exec spark-submit --master yarn --name train --queue long \
    --conf spark.dynamicAllocation.enabled=false \
    --conf spark.scheduler.barrier.maxConcurrentTasksCheck.interval=1s \
    --conf spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures=30 \
    --conf spark.executor.cores=4 \
    --conf spark.task.cpus=4 \
    --conf spark.executor.instances=3 \
    --conf spark.pyspark.python=./environment/bin/python \
    --conf spark.pyspark.driver.python=python \
    --archives 'env.tar.gz#environment' \
    --deploy-mode client \
    --conf spark.executor.memory=8g \
    train.py --epochs 3
