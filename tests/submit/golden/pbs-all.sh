#!/bin/bash
# Written by: choros submit --on pbs --nodes 2 --ranks-per-node 4 --cores 8 --time 1:30:00 --python python --gpus 1 --threads-per-core 2 --account phys --queue long --env 'A=b c' --setup 'module load conda' --wrap 'vtune -collect hotspots -r out.%r --' --mpi openmpi -o '-l filesystems=home:eagle' -o '-m abe' train.py --epochs 3
#PBS -N train
#PBS -l select=2:ncpus=64:mpiprocs=4:ompthreads=16:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=01:30:00
#PBS -A phys
#PBS -q long
#PBS -j oe
#PBS -k doe
#PBS -r y
#PBS -l filesystems=home:eagle
#PBS -m abe
cd "$PBS_O_WORKDIR" || exit 1
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
export CHOROS_REQUEUE="$PWD/.choros-requeue-$PBS_JOBID"
rm -f "$CHOROS_REQUEUE"
mpiexec -n 8 --map-by ppr:4:node:PE=8 -x OMP_NUM_THREADS -x MKL_NUM_THREADS -x OPENBLAS_NUM_THREADS -x VECLIB_MAXIMUM_THREADS -x NUMEXPR_NUM_THREADS -x TF_NUM_INTRAOP_THREADS -x TF_NUM_INTEROP_THREADS -x NPROC -x KMP_BLOCKTIME -x KMP_AFFINITY -x CHOROS_SUBMIT_CPU -x A -x CHOROS_REQUEUE -x CHOROS_STOP_AT --hostfile "$PBS_NODEFILE" bash -c 'trap "" USR2; all=(0 1 2 3); [ -z "$CUDA_VISIBLE_DEVICES" ] || IFS=, read -ra all <<<"$CUDA_VISIBLE_DEVICES"; mine=("${all[@]:$(($OMPI_COMM_WORLD_LOCAL_RANK * 1)):1}"); export CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${mine[*]}")"; exec vtune -collect hotspots -r out."$OMPI_COMM_WORLD_RANK" -- "$@"' rank python train.py --epochs 3
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
