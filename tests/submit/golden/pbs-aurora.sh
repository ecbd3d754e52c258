#!/bin/bash
# Written by: choros submit --site aurora --nodes 2 --time 1h --account a --filesystems home:flare --python python train.py --epochs 3
# Aurora, as read in github.com/argonne-lcf/user-guides, docs/aurora/data-science/frameworks (2026-08)
#PBS -N train
#PBS -l select=2
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -A a
#PBS -l filesystems=home:flare
#PBS -j oe
#PBS -k doe
#PBS -r y
cd "$PBS_O_WORKDIR" || exit 1
export OMP_NUM_THREADS=3
export MKL_NUM_THREADS=3
export OPENBLAS_NUM_THREADS=3
export VECLIB_MAXIMUM_THREADS=3
export NUMEXPR_NUM_THREADS=3
export TF_NUM_INTRAOP_THREADS=3
export TF_NUM_INTEROP_THREADS=2
export NPROC=3
export KMP_BLOCKTIME=0
export KMP_AFFINITY=none
export ZE_FLAT_DEVICE_HIERARCHY=FLAT
export CCL_PROCESS_LAUNCHER=pmix
export CCL_ATL_TRANSPORT=mpi
export CCL_KVS_MODE=mpi
export FI_MR_CACHE_MONITOR=userfaultfd
export FI_CXI_DEFAULT_CQ_SIZE=131072
export CHOROS_SUBMIT_CPU='avx avx2'
export CHOROS_STOP_AT=$(($(date +%s) + 3600 - 90))
export CHOROS_REQUEUE="$PWD/.choros-requeue-$PBS_JOBID"
rm -f "$CHOROS_REQUEUE"
mpiexec -n 24 --ppn 12 --depth 3 --cpu-bind list:2-4:10-12:18-20:26-28:34-36:42-44:54-56:62-64:70-72:78-80:86-88:94-96 bash -c 'trap "" USR2; all=(0 1 2 3 4 5 6 7 8 9 10 11); mine=("${all[@]:$((${PALS_LOCAL_RANKID:-$PMI_LOCAL_RANK} * 1)):1}"); export ZE_AFFINITY_MASK="$(IFS=,; echo "${mine[*]}")"; exec "$@"' rank python train.py --epochs 3
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
