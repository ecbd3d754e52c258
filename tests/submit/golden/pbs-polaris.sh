#!/bin/bash
# Written by: choros submit --site polaris --nodes 2 --time 1h --account a --queue debug --filesystems home:eagle --wrap 'vtune -collect hotspots -r out.%r --' --python python train.py --epochs 3
# Polaris, as read in github.com/argonne-lcf/user-guides, docs/polaris (2026-08)
#PBS -N train
#PBS -l select=2:system=polaris
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -A a
#PBS -q debug
#PBS -l filesystems=home:eagle
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
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export NCCL_COLLNET_ENABLE=1
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_MR_CACHE_MONITOR=userfaultfd
export FI_CXI_DEFAULT_CQ_SIZE=131072
export CHOROS_SUBMIT_CPU='avx avx2'
export CHOROS_STOP_AT=$(($(date +%s) + 3600 - 90))
export CHOROS_REQUEUE="$PWD/.choros-requeue-$PBS_JOBID"
rm -f "$CHOROS_REQUEUE"
mpiexec -n 8 --ppn 4 --depth 8 --cpu-bind depth bash -c 'trap "" USR2; all=(3 2 1 0); mine=("${all[@]:$((${PALS_LOCAL_RANKID:-$PMI_LOCAL_RANK} * 1)):1}"); export CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${mine[*]}")"; exec vtune -collect hotspots -r out."${PALS_RANKID:-$PMI_RANK}" -- "$@"' rank python train.py --epochs 3
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
