#!/bin/bash
# Written by: choros submit --on sge --nodes 2 --ranks-per-node 4 --cores 8 --time 1:30:00 --python python --gpus 1 --threads-per-core 2 --account phys --queue long --env 'A=b c' --setup 'module load conda' --wrap 'vtune -collect hotspots -r out.%r --' --mpi mpich -o '-pe orte 64' train.py --epochs 3
#$ -N train
#$ -cwd
#$ -j y
#$ -o train-$JOB_ID.log
#$ -l gpu=1
#$ -l h_rt=01:30:00
#$ -P phys
#$ -q long
#$ -r y
#$ -pe orte 64
# gpu=1 is asked for each slot where the site's consumable is YES, once where it is JOB
# (qconf -sc): meant are 8 in all. Give what the site counts by -o '-l gpu=N'.
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
export CHOROS_REQUEUE="$PWD/.choros-requeue-$JOB_ID"
rm -f "$CHOROS_REQUEUE"
mpiexec -n 8 -ppn 4 bash -c 'trap "" USR2; all=(0 1 2 3); [ -z "$CUDA_VISIBLE_DEVICES" ] || IFS=, read -ra all <<<"$CUDA_VISIBLE_DEVICES"; mine=("${all[@]:$(($MPI_LOCALRANKID * 1)):1}"); export CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${mine[*]}")"; exec vtune -collect hotspots -r out."$PMI_RANK" -- "$@"' rank python train.py --epochs 3
code=$?
if [ -e "$CHOROS_REQUEUE" ]; then
    rm -f "$CHOROS_REQUEUE"
    echo "choros: stopped before the time limit, the state is saved; the requeued job resumes"
    exit 99
fi
echo "choros: the ranks ended with code $code"
exit $code
