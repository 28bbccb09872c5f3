#!/usr/bin/env bash
# Trains with several processes on this machine, as on several hosts:
#
#   train/launch/local.sh 2 RECIPE.toml [--set key=value ...] [--resume]
#
# Every process gets DEVICES virtual CPU devices (default 4). It is for trying things out: one process drives all
# the GPUs or TPU chips of a machine, and pods and clusters have launch scripts of their own beside this one.
# Ctrl-C, SIGTERM or SIGHUP stops all processes after the same step, with a checkpoint; so does killing this script, on
# Linux.
set -uo pipefail
processes=$1
shift
port=${PORT:-$((20000 + RANDOM % 20000))}
export JAX_PLATFORMS=cpu
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=${DEVICES:-4}"
follow=()
if setpriv --pdeathsig TERM true 2>/dev/null; then follow=(setpriv --pdeathsig TERM); fi
pids=()
for ((index = 0; index < processes; index++)); do
  # Signals of a terminal go to all processes; these are to hear of them as SIGTERM, for which they agree on a last step.
  (trap '' INT HUP; export MOE_JAX_DISTRIBUTED="localhost:$port,$processes,$index"
    exec ${follow[@]+"${follow[@]}"} moe-jax train "$@") &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM INT HUP
status=0
for pid in "${pids[@]}"; do
  wait "$pid"
  code=$?
  # A signal that came meanwhile ends `wait`, but not the process, which is saving its checkpoint.
  while kill -0 "$pid" 2>/dev/null; do
    wait "$pid"
    code=$?
  done
  if ((code != 0)); then status=$code; fi
done
exit "$status"
