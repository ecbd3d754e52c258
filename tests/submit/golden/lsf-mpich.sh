#!/bin/bash
# Written by: choros submit --on lsf --nodes 2 --ranks-per-node 4 --cores 8 --time 1:30:00 --python python --gpus 1 --mpi mpich train.py --epochs 3
#BSUB -J train
#BSUB -n 8
#BSUB -R "span[ptile=4] affinity[core(8)]"
#BSUB -gpu "num=1/task"
#BSUB -W 1:30
#BSUB -o train-%J.log
#BSUB -r
export OMP_NUM_THREADS=8
export MKL_NUM_THREADS=8
export OPENBLAS_NUM_THREADS=8
export VECLIB_MAXIMUM_THREADS=8
export NUMEXPR_NUM_THREADS=8
export TF_NUM_INTRAOP_THREADS=8
export TF_NUM_INTEROP_THREADS=2
export NPROC=8
export KMP_BLOCKTIME=0
export KMP_AFFINITY=none
export CHOROS_SUBMIT_CPU='avx avx2'
export CHOROS_STOP_AT=$(($(date +%s) + 5400 - 90))
export CHOROS_REQUEUE="$PWD/.choros-requeue-$LSB_JOBID"
rm -f "$CHOROS_REQUEUE"
mpiexec -n 8 -ppn 4 -f "$LSB_DJOB_HOSTFILE" bash -c 'trap "" USR2; all=(0 1 2 3); [ -z "$CUDA_VISIBLE_DEVICES" ] || IFS=, read -ra all <<<"$CUDA_VISIBLE_DEVICES"; mine=("${all[@]:$(($MPI_LOCALRANKID * 1)):1}"); export CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${mine[*]}")"; exec "$@"' rank python train.py --epochs 3
code=$?
if [ -e "$CHOROS_REQUEUE" ]; then
    rm -f "$CHOROS_REQUEUE"
    echo "choros: stopped before the time limit, the state is saved; the requeued job resumes"
    brequeue "$LSB_JOBID" && exit 0
    echo "choros: the job could not be requeued: submit it again to resume" >&2
    exit 75
fi
echo "choros: the ranks ended with code $code"
exit $code
