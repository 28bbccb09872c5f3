#!/usr/bin/env bash
# Trains on a Cloud TPU pod slice: the same command on every worker. From a machine with gcloud:
#
#   train/launch/tpu_pod.sh setup NAME ZONE                    copies this checkout to all workers and installs it
#   train/launch/tpu_pod.sh train NAME ZONE RECIPE.toml [--set key=value ...] [--resume]
#
# Before renting the slice, see on any CPU machine that the step fits:
#   moe-jax train RECIPE.toml --compile-only --topology v5e:4x4
#
# The recipe, the model, the data and run_dir must lie where every worker sees them under the same path: a Filestore
# share, or a bucket mounted with gcsfuse; SHARED (default /mnt/shared) is the directory the command runs in.
# Spot slices: start with --resume always; it begins a new run where there is none, and a preempted one continues.
set -euo pipefail
job=$1 name=$2 zone=$3
shift 3

on_all_workers() {
  gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "$1"
}

case $job in
  setup)
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    archive=$(mktemp --suffix=.tar.gz)
    git -C "$root" archive --format=tar.gz -o "$archive" HEAD
    gcloud compute tpus tpu-vm scp "$archive" "$name:moe_jax.tar.gz" --zone "$zone" --worker=all
    rm "$archive"
    on_all_workers "mkdir -p moe_jax && tar -xzf moe_jax.tar.gz -C moe_jax &&
      python3 -m venv venv && venv/bin/pip install -q -e 'moe_jax[tpu]'"
    ;;
  train)
    arguments=$(printf '%q ' "$@")
    on_all_workers "cd ${SHARED:-/mnt/shared} && MOE_JAX_DISTRIBUTED=auto ~/venv/bin/moe-jax train $arguments"
    ;;
  *)
    echo "unknown job $job: setup or train" >&2
    exit 2
    ;;
esac
