"""The scripts that start runs on many machines, with programs in the place of gcloud, srun, scontrol and moe-jax."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.support.environment import ROOT

LAUNCH = ROOT / "train" / "launch"

# Two workers are two home directories on this machine. A file makes the next connection break off as ssh's do.
GCLOUD = """#!/usr/bin/env bash
echo "$*" | tr '\\n' ' ' >> "$FAKE/calls"; echo >> "$FAKE/calls"
for worker in 0 1; do
  case "$*" in *--worker=all*|*--worker=$worker*) ;; *) continue ;; esac
  home=$FAKE/worker$worker
  case "$4" in
    scp) cp "$5" "$home/${6#*:}" ;;
    ssh)
      if [[ -e $FAKE/breaks && "${*: -1}" == *follow* ]]; then rm "$FAKE/breaks"; exit 255; fi
      (cd "$home" && HOME=$home exec bash -c "${*: -1}") || exit $? ;;
  esac
done
"""
# `uv venv` and `uv pip install`; the program it installs says what it was given, and saves when it is told to stop.
UV = """#!/usr/bin/env bash
echo "uv $*" >> "$FAKE/calls"
if [[ $1 == venv ]]; then mkdir -p venv/bin && cp "$FAKE/program" venv/bin/moe-jax; fi
"""
PROGRAM = """#!/usr/bin/env bash
trap 'echo saved; exit 143' TERM
echo "$MOE_JAX_DISTRIBUTED in $(basename "$PWD"):" "$@"
for ((i = 0; i < 600; i++)); do
  if [[ -e $FAKE/end ]]; then echo done; exit 3; fi
  sleep 0.05
done
"""


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Path:
    """A folder for the programs, and for what they leave."""
    folder = tmp_path / "fake"
    (folder / "bin").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(folder))
    write_program(folder / "program", PROGRAM)
    return folder


def sh(*arguments: str | Path, **changed: str) -> subprocess.CompletedProcess:
    environment = os.environ | changed
    return subprocess.run(
        [*map(str, arguments)], env=environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCH.glob("*.sh")))
def test_a_script_can_be_read_by_bash(script):
    assert os.access(LAUNCH / script, os.X_OK)
    assert sh("bash", "-n", LAUNCH / script).returncode == 0


@pytest.fixture
def pod(fake) -> Path:
    """Two workers on which this checkout is installed."""
    if not (ROOT / ".git").exists():
        pytest.skip("what is copied to the workers is a commit")
    write_program(fake / "bin" / "gcloud", GCLOUD)
    write_program(fake / "bin" / "uv", UV)
    for worker in (0, 1):
        (fake / f"worker{worker}").mkdir()
    (fake / "shared").mkdir()
    done = sh(LAUNCH / "tpu_pod.sh", "setup", "pod", "us-west4-a")
    assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        folder = fake / f"worker{worker}"
        assert (folder / "moe_jax" / "pyproject.toml").is_file() and (folder / "venv/bin/moe-jax").is_file()
        # Of this working tree, which may be newer than its last commit.
        shutil.copy(LAUNCH / "job.sh", folder / "moe_jax/train/launch/job.sh")
    assert "uv venv --quiet --clear --python 3.12 venv" in (fake / "calls").read_text()
    assert "uv pip install --quiet --python venv/bin/python -e moe_jax[tpu]" in (fake / "calls").read_text()
    return fake


def test_a_pod_goes_on_when_the_connection_drops(pod):
    script = LAUNCH / "tpu_pod.sh"
    (pod / "breaks").touch()
    arguments = ["pod", "us-west4-a", "recipe.toml", "--set", "run_dir=a b"]
    started = subprocess.Popen(
        [script, "train", *arguments],
        env=os.environ | {"SHARED": str(pod / "shared"), "RETRY_SECONDS": "0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while not all((pod / f"worker{w}/moe_jax_job/log").exists() for w in (0, 1)) and time.monotonic() < deadline:
        time.sleep(0.05)
    status = sh(script, "status", "pod", "us-west4-a").stdout.splitlines()
    assert len(status) == 2 and all(": running; " in line for line in status)
    again = sh(script, "train", *arguments, SHARED=str(pod / "shared"))
    assert again.returncode == 2 and "job is running" in again.stderr
    # The terminal goes away altogether, and the run does not.
    time.sleep(0.5)
    assert not (pod / "breaks").exists()
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate()
    assert all(": running; " in line for line in sh(script, "status", "pod", "us-west4-a").stdout.splitlines())
    (pod / "end").touch()
    done = sh(script, "logs", "pod", "us-west4-a", "1")
    assert done.returncode == 3
    assert done.stdout == "auto in shared: train recipe.toml --set run_dir=a b\ndone\n"
    status = sh(script, "status", "pod", "us-west4-a").stdout.splitlines()
    assert len(status) == 2 and all(line.endswith(": ended with exit code 3; done") for line in status)


def test_a_pod_is_stopped_and_saves(pod):
    script = LAUNCH / "tpu_pod.sh"
    started = subprocess.Popen(
        [script, "train", "pod", "us-west4-a", "recipe.toml"],
        env=os.environ | {"SHARED": str(pod / "shared")},
        stdout=subprocess.PIPE,
        text=True,
    )
    # A worker that has not come so far ends without saving: both have said which run they begin.
    logs = [pod / f"worker{worker}/moe_jax_job/log" for worker in (0, 1)]
    deadline = time.monotonic() + 30
    while not all(log.exists() and "auto in shared" in log.read_text() for log in logs):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stopped = sh(script, "stop", "pod", "us-west4-a")
    assert stopped.returncode == 0 and stopped.stdout.count("ended with exit code 143") == 2
    assert "saved\n" in started.communicate(timeout=30)[0] and started.returncode == 143
    assert all(log.read_text().endswith("\nsaved\n") for log in logs)


def test_what_was_not_asked_of_a_pod_is_said(fake):
    done = sh(LAUNCH / "tpu_pod.sh", "status")
    assert done.returncode == 2 and "train/launch/tpu_pod.sh logs NAME ZONE [WORKER]" in done.stderr
    assert "set -" not in done.stderr
    done = sh(LAUNCH / "tpu_pod.sh", "start", "pod", "zone")
    assert done.returncode == 2 and done.stderr == "unknown job start: setup, train, logs, status or stop\n"
    done = sh(LAUNCH / "job.sh", "follow", MOE_JAX_JOB=str(fake / "none"))
    assert done.returncode == 2 and "job was started" in done.stderr


SRUN = """#!/usr/bin/env bash
echo "MOE_JAX_DISTRIBUTED=$MOE_JAX_DISTRIBUTED SRUN_CPUS_PER_TASK=$SRUN_CPUS_PER_TASK srun $*" >> "$FAKE/calls"
if [[ -e $FAKE/fails ]]; then exit 1; fi
if [[ -e $FAKE/waits ]]; then
  trap 'sleep 0.5; echo saved >> "$FAKE/calls"; exit 143' TERM
  touch "$FAKE/started"
  for ((i = 0; i < 600; i++)); do sleep 0.05; done
fi
"""


@pytest.mark.parametrize(
    ("state", "code", "requeued"), [("", 0, False), ("fails", 1, False), ("waits", 143, True)], ids=str
)
def test_slurm_queues_a_run_again_that_was_stopped_and_no_other(fake, state, code, requeued):
    write_program(fake / "bin" / "srun", SRUN)
    write_program(fake / "bin" / "scontrol", '#!/bin/sh\necho "scontrol $*" >> "$FAKE/calls"\n')
    if state:
        (fake / state).touch()
    environment = os.environ | {"SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "32"}
    started = subprocess.Popen([LAUNCH / "slurm.sh", "recipe.toml", "--set", "train.steps=9"], env=environment)
    deadline = time.monotonic() + 30
    while state == "waits" and not (fake / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if state == "waits":
        started.send_signal(signal.SIGTERM)
    assert started.wait(timeout=30) == code
    calls = (fake / "calls").read_text().splitlines()
    assert calls[0] == (
        "MOE_JAX_DISTRIBUTED=auto SRUN_CPUS_PER_TASK=32 srun --kill-on-bad-exit=1 moe-jax train recipe.toml --set "
        "train.steps=9 --resume"
    )
    assert calls[1:] == (["saved", "scontrol requeue 17"] if requeued else [])


@pytest.mark.parametrize(("kind", "resource"), [("tpu", "google.com/tpu"), ("gpu", "nvidia.com/gpu")])
def test_a_jobset_starts_every_process_with_its_place(kind, resource, fake):
    (job_set,) = yaml.safe_load_all((LAUNCH / f"jobset_{kind}.yaml").read_text())
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = job_set["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    values = {one["name"]: one["value"] for one in container["env"]}
    nodes, devices = job["parallelism"], container["resources"]["limits"][resource]
    assert job["completionMode"] == "Indexed" and job["completions"] == nodes == int(values["PROCESSES"])
    assert job["backoffLimit"] == 0 and spec["failurePolicy"]["maxRestarts"] > 0 and replicated["replicas"] == 1
    assert int(values["MOE_JAX_LOCAL_DEVICES"]) == devices and nodes * devices == 16
    assert spec["network"]["enableDNSHostnames"] is True
    if kind == "tpu":
        rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
        assert rows * columns == 16
    # Every volume that is mounted is there.
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    # The first pod's name is as JobSet makes it.
    first = f"{job_set['metadata']['name']}-{replicated['name']}-0-0.{spec['network']['subdomain']}"
    ends_well = PROGRAM.replace("exit 3", "mkdir -p run/model; touch run/model/config.json; exit 0")
    write_program(fake / "bin" / "moe-jax", ends_well)
    folder = fake / "shared"
    folder.mkdir()
    command = [*container["command"], *container["args"]]

    def start() -> subprocess.Popen:
        environment = os.environ | values | {"JOB_COMPLETION_INDEX": "1"}
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)

    with start() as stopped:
        assert stopped.stdout is not None
        line = stopped.stdout.readline()
        assert line == f"{first}:8476,{nodes},1 in shared: train pod.toml --resume --set run_dir=run\n"
        stopped.send_signal(signal.SIGTERM)
        # It saved, and is not done.
        assert stopped.communicate(timeout=30)[0] == "saved\n" and stopped.returncode == 143
    (fake / "end").touch()
    with start() as whole:
        assert whole.communicate(timeout=30)[0].endswith("done\n") and whole.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="a process hears of the end of another one on Linux only")
def test_processes_on_this_machine_end_with_the_script_that_started_them(tmp_path):
    program = tmp_path / "moe-jax"
    program.write_text("#!/bin/bash\ntrap 'echo saved; exit' TERM\necho $1\nwhile true; do sleep 0.05; done\n")
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(LAUNCH / "local.sh"), "2", "recipe.toml"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert [script.stdout.readline() for _ in range(2)] == ["train\n"] * 2
        script.kill()
        assert script.communicate(timeout=20)[0] == "saved\n" * 2


def test_the_walkthrough_names_what_is_there():
    text = (ROOT / "docs" / "guides" / "checkpoint-to-pod.md").read_text(encoding="utf-8")
    named = set(re.findall(r"train/launch/([\w.]+)", text))
    assert named >= {"tpu_pod.sh", "slurm.sh", "jobset_tpu.yaml", "jobset_gpu.yaml", "local.sh"}
    assert all((LAUNCH / name).is_file() for name in named)
