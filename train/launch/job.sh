#!/usr/bin/env bash
# A command on this machine that goes on when the connection ends over which it was started. tpu_pod.sh runs this on
# every worker; it is of use on any machine.
#
#   job.sh start COMMAND...   in the background; one job at a time
#   job.sh follow             shows what it prints, to its end, and exits with its code
#   job.sh status             whether it runs, and its last line
#   job.sh stop               SIGTERM, for which a run saves a checkpoint; returns when the job has ended
#
# MOE_JAX_JOB (default ~/moe_jax_job) holds its log, the log before that, its process and its exit code.
set -euo pipefail
action=${1:-}
folder=${MOE_JAX_JOB:-$HOME/moe_jax_job}

is_running() {
  [[ -e $folder/pid && ! -e $folder/code ]] && kill -0 "$(<"$folder/pid")" 2>/dev/null
}

exit_code() {
  # Without one, the job was killed, or its machine was started anew.
  [[ -e $folder/code ]] && cat "$folder/code" || echo 1
}

need_job() {
  if [[ ! -e $folder/pid ]]; then
    echo "no job was started on $(hostname)" >&2
    exit 2
  fi
}

case $action in
  start)
    shift
    mkdir -p "$folder"
    if is_running; then
      echo "a job is running on $(hostname), process $(<"$folder/pid"): stop it first" >&2
      exit 2
    fi
    rm -f "$folder/code"
    if [[ -e $folder/log ]]; then mv "$folder/log" "$folder/log.before"; fi
    # The trap keeps this shell alive until the command has saved; the command itself gets the signal as usual.
    setsid nohup bash -c 'trap : TERM
      "${@:2}"
      echo $? > "$1/code.new" && mv "$1/code.new" "$1/code"' job "$folder" "$@" >"$folder/log" 2>&1 </dev/null &
    echo $! >"$folder/pid"
    echo "started on $(hostname)"
    ;;
  follow)
    need_job
    tail -n +1 -F --pid="$(<"$folder/pid")" "$folder/log"
    exit "$(exit_code)"
    ;;
  status)
    need_job
    if is_running; then state="running"; else state="ended with exit code $(exit_code)"; fi
    echo "$(hostname): $state; $(tail -n 1 "$folder/log" | cut -c 1-200)"
    ;;
  stop)
    need_job
    if is_running; then
      kill -TERM -- "-$(<"$folder/pid")"
      while is_running; do sleep 1; done
    fi
    echo "$(hostname): ended with exit code $(exit_code)"
    ;;
  *)
    echo "unknown action '$action': start, follow, status or stop" >&2
    exit 2
    ;;
esac
