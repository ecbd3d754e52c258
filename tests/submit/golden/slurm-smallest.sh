#!/bin/bash
# Written by: choros submit --on slurm --python python --mpi cray_shasta --signal 0 train.py --epochs 3
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --output=train-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
export OMP_NUM_THREADS=1
export MKL_NUM_THREADS=1
export OPENBLAS_NUM_THREADS=1
export VECLIB_MAXIMUM_THREADS=1
export NUMEXPR_NUM_THREADS=1
export TF_NUM_INTRAOP_THREADS=1
export TF_NUM_INTEROP_THREADS=1
export NPROC=1
export KMP_BLOCKTIME=0
export KMP_AFFINITY=none
export CHOROS_SUBMIT_CPU='avx avx2'
export CHOROS_REQUEUE="$PWD/.choros-requeue-$SLURM_JOB_ID"
rm -f "$CHOROS_REQUEUE"
srun --kill-on-bad-exit=1 --label --mpi=cray_shasta --nodes=1 --ntasks-per-node=1 --cpus-per-task=1 bash -c 'trap "" USR2; exec "$@"' rank python train.py --epochs 3
code=$?
if [ -e "$CHOROS_REQUEUE" ]; then
    rm -f "$CHOROS_REQUEUE"
    echo "choros: stopped before the time limit, the state is saved; the requeued job resumes"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "choros: the job could not be requeued: submit it again to resume" >&2
    exit 75
fi
echo "choros: the ranks ended with code $code"
exit $code
