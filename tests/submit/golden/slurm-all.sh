#!/bin/bash
# Written by: choros submit --on slurm --nodes 2 --ranks-per-node 4 --cores 8 --time 1:30:00 --python python --gpus 1 --threads-per-core 2 --account phys --queue long --env 'A=b c' --setup 'module load conda' --wrap 'vtune -collect hotspots -r out.%r --' --mpi openmpi --signal 120 -o --exclusive -o --mail-type=END train.py --epochs 3
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --threads-per-core=2
#SBATCH --gpus-per-task=1
#SBATCH --time=01:30:00
#SBATCH --account=phys
#SBATCH --partition=long
#SBATCH --output=train-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --exclusive
#SBATCH --mail-type=END
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
export CHOROS_REQUEUE="$PWD/.choros-requeue-$SLURM_JOB_ID"
rm -f "$CHOROS_REQUEUE"
srun --kill-on-bad-exit=1 --label --mpi=pmix --nodes=2 --ntasks-per-node=4 --cpus-per-task=16 --gpus-per-task=1 bash -c 'trap "" USR2; exec vtune -collect hotspots -r out."$SLURM_PROCID" -- "$@"' rank python train.py --epochs 3
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
