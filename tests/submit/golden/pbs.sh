#!/bin/bash
# Written by: choros submit --on pbs --nodes 2 --ranks-per-node 4 --cores 8 --time 1:30:00 --python python --mpi mpich train.py --epochs 3
#PBS -N train
#PBS -l select=2:ncpus=32:mpiprocs=4:ompthreads=8
#PBS -l place=scatter
#PBS -l walltime=01:30:00
#PBS -j oe
#PBS -k doe
#PBS -r y
cd "$PBS_O_WORKDIR" || exit 1
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
export CHOROS_REQUEUE="$PWD/.choros-requeue-$PBS_JOBID"
rm -f "$CHOROS_REQUEUE"
mpiexec -n 8 -ppn 4 -f "$PBS_NODEFILE" bash -c 'trap "" USR2; exec "$@"' rank python train.py --epochs 3
code=$?
if [ -e "$CHOROS_REQUEUE" ]; then
    rm -f "$CHOROS_REQUEUE"
    echo "choros: stopped before the time limit, the state is saved; the requeued job resumes"
    cd "$PBS_O_WORKDIR" && qsub train.pbs.sh && exit 0
    echo "choros: the job could not be requeued: submit it again to resume" >&2
    exit 75
fi
echo "choros: the ranks ended with code $code"
exit $code
