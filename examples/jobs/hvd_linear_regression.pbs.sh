#!/bin/bash
# Written by: choros submit --on pbs --nodes 2 --ranks-per-node 4 --cores 8 --time 0:30:00 --mpi mpich --setup 'source venv/bin/activate' --script jobs/hvd_linear_regression.pbs.sh hvd_linear_regression.py
#PBS -N hvd_linear_regression
#PBS -l select=2:ncpus=32:mpiprocs=4:ompthreads=8
#PBS -l place=scatter
#PBS -l walltime=00:30:00
#PBS -j oe
#PBS -k doe
#PBS -r y
cd "$PBS_O_WORKDIR" || exit 1
source venv/bin/activate
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
export CHOROS_STOP_AT=$(($(date +%s) + 1800 - 90))
export CHOROS_REQUEUE="$PWD/.choros-requeue-$PBS_JOBID"
rm -f "$CHOROS_REQUEUE"
mpiexec -n 8 -ppn 4 -f "$PBS_NODEFILE" bash -c 'trap "" USR2; exec "$@"' rank python hvd_linear_regression.py
code=$?
if [ -e "$CHOROS_REQUEUE" ]; then
    rm -f "$CHOROS_REQUEUE"
    echo "choros: stopped before the time limit, the state is saved; the requeued job resumes"
    cd "$PBS_O_WORKDIR" && qsub jobs/hvd_linear_regression.pbs.sh && exit 0
    echo "choros: the job could not be requeued: submit it again to resume" >&2
    exit 75
fi
echo "choros: the ranks ended with code $code"
exit $code
