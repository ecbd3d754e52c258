#!/bin/bash
# Written by: choros submit --site perlmutter --nodes 2 --time 30m --account m1 --queue regular --python python train.py --epochs 3
# Perlmutter, as read in github.com/NERSC/dl-at-scale-training (2025-02)
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=00:30:00
#SBATCH --account=m1
#SBATCH --qos=regular
#SBATCH --output=train-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --constraint=gpu
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
export FI_MR_CACHE_MONITOR=userfaultfd
export HDF5_USE_FILE_LOCKING=FALSE
export CHOROS_SUBMIT_CPU='avx avx2'
export CHOROS_REQUEUE="$PWD/.choros-requeue-$SLURM_JOB_ID"
rm -f "$CHOROS_REQUEUE"
srun --kill-on-bad-exit=1 --label --mpi=cray_shasta --nodes=2 --ntasks-per-node=4 --cpus-per-task=32 --gpus-per-node=4 --cpu-bind=cores bash -c 'trap "" USR2; all=(3 2 1 0); mine=("${all[@]:$(($SLURM_LOCALID * 1)):1}"); export CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${mine[*]}")"; exec "$@"' rank python train.py --epochs 3
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
