#!/usr/bin/env bash
# Trains on a Slurm cluster, one process per node, which drives all GPUs of its node:
#
#   sbatch --nodes=4 train/launch/slurm.sh RECIPE.toml [--set key=value ...]
#
# Give sbatch --gpus-per-node where nodes have other than 8. A process that finds fewer GPUs than Slurm gave to its node
# ends the job with one line, and so does one that is killed.
# Submit from the directory that the paths in the recipe are relative to, with `moe-jax` on the PATH (module load, or
# an activated environment); run_dir must be on storage that all nodes share.
# Two minutes before the time limit the run saves, and the job is queued again to go on from there.
#SBATCH --job-name=moe-jax
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail

stopped=0
trap 'stopped=1; kill -TERM "$step"' TERM
# Newer versions of srun do not take this from sbatch by themselves.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
# The processes find each other through Slurm's variables. --resume starts a new run where there is none.
MOE_JAX_DISTRIBUTED=auto srun --kill-on-bad-exit=1 moe-jax train "$@" --resume &
step=$!
wait "$step"
status=$?
# The signal ends `wait`, but not the run, which is saving its checkpoint.
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  status=$?
done
if ((stopped && status == 143)); then  # of SIGTERM: the run has saved
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
