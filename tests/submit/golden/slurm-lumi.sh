#!/bin/bash
# Written by: choros submit --site lumi --nodes 2 --time 30m --account project_1 --queue standard-g --python python train.py --epochs 3
# LUMI, as read in github.com/Lumi-supercomputer/LUMI-AI-Guide (2026-05)
# LUMI, as read in github.com/Lumi-supercomputer/lumi-userguide (2024-10)
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=8
#SBATCH --time=00:30:00
#SBATCH --account=project_1
#SBATCH --partition=standard-g
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
export NCCL_NET_GDR_LEVEL=3
export FI_CXI_DISABLE_CQ_HUGETLB=1
export CXI_FORK_SAFE=1
export CHOROS_SUBMIT_CPU='avx avx2'
export CHOROS_REQUEUE="$PWD/.choros-requeue-$SLURM_JOB_ID"
rm -f "$CHOROS_REQUEUE"
srun --kill-on-bad-exit=1 --label --mpi=cray_shasta --nodes=2 --ntasks-per-node=8 --cpus-per-task=7 --gpus-per-node=8 --cpu-bind=mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000 bash -c 'trap "" USR2; all=(0 1 2 3 4 5 6 7); mine=("${all[@]:$(($SLURM_LOCALID * 1)):1}"); export ROCR_VISIBLE_DEVICES="$(IFS=,; echo "${mine[*]}")"; exec "$@"' rank python train.py --epochs 3
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
