#!/bin/bash
# Written by: choros submit --on flux --nodes 2 --ranks-per-node 4 --cores 8 --time 1:30:00 --python python --gpus 1 --threads-per-core 2 --account phys --queue long --env 'A=b c' --setup 'module load conda' --wrap 'vtune -collect hotspots -r out.%r --' -o --exclusive train.py --epochs 3
# flux: --job-name=train
# flux: --nodes=2
# flux: --nslots=8
# flux: --cores-per-slot=8
# flux: --gpus-per-slot=1
# flux: --time-limit=5400s
# flux: --bank=phys
# flux: --queue=long
# flux: --output=train-{{id}}.log
# flux: --exclusive
begun_in=$PWD
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
export CHOROS_REQUEUE="$PWD/.choros-requeue-$(flux getattr jobid)"
rm -f "$CHOROS_REQUEUE"
flux run --label-io --nodes=2 --ntasks=8 --cores-per-task=8 --gpus-per-task=1 -o cpu-affinity=per-task -o gpu-affinity=per-task bash -c 'trap "" USR2; exec vtune -collect hotspots -r out."$FLUX_TASK_RANK" -- "$@"' rank python train.py --epochs 3
code=$?
if [ -e "$CHOROS_REQUEUE" ]; then
    rm -f "$CHOROS_REQUEUE"
    echo "choros: stopped before the time limit, the state is saved; the requeued job resumes"
    cd "$begun_in" && flux --parent batch train.flux.sh && exit 0
    echo "choros: the job could not be requeued: submit it again to resume" >&2
    exit 75
fi
echo "choros: the ranks ended with code $code"
exit $code
