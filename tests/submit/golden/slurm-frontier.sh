#!/bin/bash
# Written by: choros submit --site frontier --nodes 4 --time 2h --account phys --queue batch --python python train.py --epochs 3
# Frontier, as read in github.com/olcf/olcf-user-docs, systems/frontier_user_guide.rst (2026-07)
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-task=1
#SBATCH --gpu-bind=closest
#SBATCH --time=02:00:00
#SBATCH --account=phys
#SBATCH --partition=batch
#SBATCH --output=train-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@90
export OMP_NUM_THREADS=7
export MKL_NUM_THREADS=7
export OPENBLAS_NUM_THREADS=7
export VECLIB_MAXIMUM_THREADS=7
export NUMEXPR_NUM_THREADS=7
export TF_NUM_INTRAOP_THREADS=7
export TF_NUM_INTEROP_THREADS=2
export NPROC=7
export KMP_BLOCKTIME=0
export KMP_AFFINITY=none
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
export NCCL_CROSS_NIC=1
export NCCL_NET_GDR_LEVEL=PHB
export FI_MR_CACHE_MONITOR=kdreg2
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_CXI_RDZV_PROTO=alt_read
export CHOROS_SUBMIT_CPU='avx avx2'
export CHOROS_REQUEUE="$PWD/.choros-requeue-$SLURM_JOB_ID"
rm -f "$CHOROS_REQUEUE"
srun --kill-on-bad-exit=1 --label --mpi=cray_shasta --nodes=4 --ntasks-per-node=8 --cpus-per-task=7 --gpus-per-task=1 --gpu-bind=closest bash -c 'trap "" USR2; exec "$@"' rank python train.py --epochs 3
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
