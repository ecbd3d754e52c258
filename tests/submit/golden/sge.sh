#!/bin/bash
# Written by: choros submit --on sge --nodes 2 --ranks-per-node 4 --cores 8 --time 1:30:00 --python python --mpi openmpi train.py --epochs 3
#$ -N train
#$ -cwd
#$ -j y
#$ -o train-$JOB_ID.log
#$ -pe mpi 64
#$ -l h_rt=01:30:00
#$ -r y
# The site's parallel environment decides on how many hosts 64 slots lie (qconf -sp mpi):
# meant are 2, by an allocation_rule of 32. Name one that has it by -o '-pe NAME 64'.
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
export CHOROS_REQUEUE="$PWD/.choros-requeue-$JOB_ID"
rm -f "$CHOROS_REQUEUE"
mpiexec -n 8 --map-by ppr:4:node:PE=8 -x OMP_NUM_THREADS -x MKL_NUM_THREADS -x OPENBLAS_NUM_THREADS -x VECLIB_MAXIMUM_THREADS -x NUMEXPR_NUM_THREADS -x TF_NUM_INTRAOP_THREADS -x TF_NUM_INTEROP_THREADS -x NPROC -x KMP_BLOCKTIME -x KMP_AFFINITY -x CHOROS_SUBMIT_CPU -x CHOROS_REQUEUE -x CHOROS_STOP_AT bash -c 'trap "" USR2; exec "$@"' rank python train.py --epochs 3
code=$?
if [ -e "$CHOROS_REQUEUE" ]; then
    rm -f "$CHOROS_REQUEUE"
    echo "choros: stopped before the time limit, the state is saved; the requeued job resumes"
    exit 99
fi
echo "choros: the ranks ended with code $code"
exit $code
