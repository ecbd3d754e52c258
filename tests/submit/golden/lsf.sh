#!/bin/bash
# Written by: choros submit --on lsf --nodes 2 --ranks-per-node 4 --cores 8 --time 1:30:00 --python python --gpus 1 --threads-per-core 2 --account phys --queue long --env 'A=b c' --setup 'module load conda' --wrap 'vtune -collect hotspots -r out.%r --' --mpi jsrun train.py --epochs 3
#BSUB -J train
#BSUB -nnodes 2
#BSUB -W 1:30
#BSUB -P phys
#BSUB -q long
#BSUB -o train-%J.log
#BSUB -r
module load conda
export OMP_NUM_THREADS=16
export MKL_NUM_THREADS=16
export OPENBLAS_NUM_THREADS=16
export VECLIB_MAXIMUM_THREADS=16
export NUMEXPR_NUM_THREADS=16
export TF_NUM_INTRAOP_THREADS=16
export TF_NUM_INTEROP_THREADS=2
export NPROC=16
export KMP_BLOCKTIME=0
export KMP_AFFINITY=none
export CHOROS_SUBMIT_CPU='avx avx2'
export A='b c'
export CHOROS_STOP_AT=$(($(date +%s) + 5400 - 90))
export CHOROS_REQUEUE="$PWD/.choros-requeue-$LSB_JOBID"
rm -f "$CHOROS_REQUEUE"
jsrun -n 8 -r 4 -a 1 -c 8 -g 1 -b rs bash -c 'trap "" USR2; exec vtune -collect hotspots -r out."$JSM_NAMESPACE_RANK" -- "$@"' rank python train.py --epochs 3
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
