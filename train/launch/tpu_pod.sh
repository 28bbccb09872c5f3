#!/usr/bin/env bash
# Trains on a Cloud TPU pod slice: the same command on every worker. From a machine with gcloud:
#
#   train/launch/tpu_pod.sh setup NAME ZONE                    copies this checkout to all workers and installs it
#   train/launch/tpu_pod.sh train NAME ZONE RECIPE.toml [--set key=value ...] [--resume]
#   train/launch/tpu_pod.sh logs NAME ZONE [WORKER]            follows the run again, by default on worker 0
#   train/launch/tpu_pod.sh status NAME ZONE                   of every worker: whether it runs, and its last line
#   train/launch/tpu_pod.sh stop NAME ZONE                     saves a checkpoint and ends the run
#
# The run does not need the connection that it was started over: when that drops, or with Ctrl-C, it goes on, and `logs`
# shows it again. Python comes with it, whatever the workers have (uv installs it).
#
# Before renting the slice, see on any CPU machine that the step fits:
#   moe-jax train RECIPE.toml --compile-only --topology v5e:4x4
#
# The recipe, the model, the data and run_dir must lie where every worker sees them under the same path: a Filestore
# share, or a bucket mounted with gcsfuse; SHARED (default /mnt/shared) is the directory the command runs in.
# Spot slices: start with --resume always; it begins a new run where there is none, and a preempted one continues.
set -euo pipefail
if (($# < 3)); then
  sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
job=$1 name=$2 zone=$3
shift 3

on() {
  gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker="$1" --command "$2"
}

# What workers do is in job.sh of the checkout that they have.
follow() {
  local code
  while true; do
    code=0
    on "$1" 'moe_jax/train/launch/job.sh follow' || code=$?
    if ((code != 255)); then return "$code"; fi  # ssh's own
    echo "the connection was lost; the run goes on, and so does this" >&2
    sleep "${RETRY_SECONDS:-10}"
  done
}

case $job in
  setup)
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    archive=$(mktemp --suffix=.tar.gz)
    trap 'rm -f "$archive"' EXIT
    git -C "$root" archive --format=tar.gz -o "$archive" HEAD
    gcloud compute tpus tpu-vm scp "$archive" "$name:moe_jax.tar.gz" --zone "$zone" --worker=all
    on all 'set -e
      rm -rf moe_jax && mkdir moe_jax && tar -xzf moe_jax.tar.gz -C moe_jax
      export PATH="$HOME/.local/bin:$PATH"
      command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
      uv venv --quiet --clear --python 3.12 venv
      uv pip install --quiet --python venv/bin/python -e "moe_jax[tpu]"'
    ;;
  train)
    arguments=$(printf '%q ' "$@")
    on all "cd ${SHARED:-/mnt/shared} &&
      ~/moe_jax/train/launch/job.sh start env MOE_JAX_DISTRIBUTED=auto ~/venv/bin/moe-jax train $arguments"
    follow 0
    ;;
  logs)
    follow "${1:-0}"
    ;;
  status | stop)
    on all "moe_jax/train/launch/job.sh $job"
    ;;
  *)
    echo "unknown job $job: setup, train, logs, status or stop" >&2
    exit 2
    ;;
esac
