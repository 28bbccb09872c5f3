"""The connection between the processes of a job: small programs, which come, wait and end in many ways."""

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import jax
import pytest

from moe_jax.core.errors import InputError
from moe_jax.distributed import coordination, job_place
from moe_jax.distributed.job_place import Place
from tests.support.environment import ROOT
from tests.support.forked import OF_COORDINATION, start
from tests.support.tiers import one_in

PROGRAM = """
import faulthandler, os, sys, time
faulthandler.dump_traceback_later(120, exit=True)  # a process that waits for the others for ever
from moe_jax.core.errors import InputError
from moe_jax.distributed.coordination import Coordination
from moe_jax.distributed.job_place import Place

port, count, index, wait, silence, code = sys.argv[1:]
index = int(index)
others = Coordination(Place("localhost:" + port, int(count), index), wait=float(wait), silence=float(silence))
try:
    others.join({"code": code}, one_works=True)
except InputError as error:
    others.fail(2, str(error))
    print("refused:", error, file=sys.stderr, flush=True)
    os._exit(2)
print("joined", flush=True)
for line in map(str.strip, sys.stdin):
    if line == "fail":
        others.fail(2, "line 3 is bad\\x1b[2J")
        others.fail(1, "said again, when what was begun is put away")
        print("moe-jax: error: line 3 is bad", file=sys.stderr, flush=True)
        os._exit(2)
    if line == "meet":
        for number in range(3):
            others.meet()
            print("met", number, flush=True)
    if line == "tell":
        others.tell_first({"layer": index, "figures": [1.5, None]})
    if line == "hear":
        heard = others.news(0.0)
        while len(heard) < 2:
            heard += others.news(20.0)
        print(sorted(heard, key=str), others.news(0.0), flush=True)
    if line.startswith("work"):
        for step in range(1, 1000):
            if step == 5 and line == "work and ask":
                others.ask_to_stop(15)
            signal = others.stop_after(step)
            if signal is not None:
                print("stopped after", step, signal, flush=True)
                break
            time.sleep(0.01 * (index == 2))
            if step > 1:  # no step is begun before the last but one is computed, by all
                others.meet()
    if line == "leave":
        others.leave()
        print("left", flush=True)
        sys.exit(0)
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def started(*processes: tuple[int, int, str], port: int | None = None, wait: float = 20, silence: float = 60):
    """Processes that are each told their number, index and code."""
    port = port or free_port()
    begun = [
        start(
            [sys.executable, "-c", PROGRAM, *map(str, (port, count, index, wait, silence, code))],
            imports=OF_COORDINATION,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        )
        for count, index, code in processes
    ]
    try:
        yield begun
    finally:
        for process in begun:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def job(count: int, silence: float = 60) -> Iterator[list[subprocess.Popen]]:
    """Processes that have all come, and wait for a line that says what they do."""
    with started(*((count, index, "abc") for index in range(count)), silence=silence) as processes:
        assert [process.stdout.readline() for process in processes] == ["joined\n"] * count
        yield processes


def tell(process: subprocess.Popen, line: str) -> None:
    process.stdin.write(line + "\n")
    process.stdin.flush()


def ends(processes: Sequence[subprocess.Popen], within: float) -> list[tuple[int, str]]:
    """Exit codes and what was said on standard error, without what the runtime logs."""
    end = time.monotonic() + within
    ended = []
    for process in processes:
        process.wait(max(0.1, end - time.monotonic()))
        lines = process.stderr.read().splitlines(keepends=True)
        ended.append((process.returncode, "".join(line for line in lines if "coordination_service" not in line)))
    return ended


@one_in(4)
@pytest.mark.parametrize(
    ("victim", "how"), [(0, signal.SIGSTOP), (0, signal.SIGKILL), (2, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_all_end_when_one_is_killed_or_not_heard_of(victim, how):
    """A process that is stopped is as one whose host loses its power: its connection is not closed."""
    with job(3, silence=3) as processes:
        time.sleep(3.5)
        assert [process.poll() for process in processes] == [None] * 3  # those that are alive are not taken to be dead
        processes[victim].send_signal(how)
        others = [process for index, process in enumerate(processes) if index != victim]
        for code, said in ends(others, within=15):
            assert code == 1 and said.count("\n") == 1
            assert f"moe-jax: error: process {victim} ({victim + 1} of 3, on {socket.gethostname()}) is gone: " in said


def all_say_what_one_said(processes: Sequence[subprocess.Popen], index: int) -> None:
    """One of them ends with an error, and all say so."""
    tell(processes[index], "fail")
    for other, (code, said) in enumerate(ends(processes, within=10)):
        assert code == 2 and "line 3 is bad" in said and said.count("\n") == 1
        if other != index:
            assert f"process {index} ({index + 1} of {len(processes)}, on " in said and "\x1b" not in said


def test_what_the_first_says_before_it_ends_all_say():
    with job(2) as processes:
        all_say_what_one_said(processes, 0)


@pytest.mark.parametrize("asks", [0, 1])
def test_what_they_tell_each_other(asks):
    """They meet, hear, stop together, and leave together, or end when one that is not the first fails."""
    with job(3) as processes:
        for process in processes[:2]:
            tell(process, "meet")
        # Nobody passes before all have come.
        assert not select.select([process.stdout for process in processes], [], [], 1.0)[0]
        tell(processes[2], "meet")
        tell(processes[0], "hear")
        for process in processes[1:]:
            tell(process, "tell")
        for process in processes:
            assert [process.stdout.readline() for _ in range(3)] == [f"met {number}\n" for number in range(3)]
        told = [{"layer": index, "figures": [1.5, None]} for index in (1, 2)]
        assert processes[0].stdout.readline() == f"{sorted(told, key=str)} []\n"
        for index, process in enumerate(processes):
            tell(process, "work and ask" if index == asks else "work")
        (stopped,) = {process.stdout.readline() for process in processes}
        step, number = map(int, stopped.removeprefix("stopped after ").split())
        assert 5 < step < 20 and number == 15
        if asks == 1:
            return all_say_what_one_said(processes, 1)
        for process in processes[1:]:
            tell(process, "leave")
        time.sleep(0.5)
        assert [process.poll() for process in processes] == [None] * 3  # they wait for the first
        tell(processes[0], "leave")
        assert ends(processes, within=20) == [(0, "")] * 3


@pytest.mark.parametrize(
    ("second", "differs"),
    [((2, 1, "b"), "code is b there, and a here"), ((4, 1, "a"), "number of processes is 4 there, and 2 here")],
)
def test_processes_that_differ_are_refused_and_all_hear_why(second, differs):
    with started((2, 0, "a"), second) as processes:
        for code, said in ends(processes, within=20):
            assert code == 2 and said.count("\n") == 1
            assert f"process 1 (on {socket.gethostname()}) and the first do not fit: {differs}" in said


def test_a_process_that_is_ended_because_of_another_says_nothing_more(monkeypatch):
    """It may have found the same problem, and be about to say so, while the reason of the other one is written."""
    said = []
    monkeypatch.setattr(coordination, "_exit", lambda code, message: said.append(message))
    others = coordination.Coordination(Place("localhost:1", 2, 1), wait=1, silence=1)
    others._client = object()  # as if it had joined
    others._end(2, "process 0 ended: code is b there, and a here")
    failing = threading.Thread(target=others.fail, args=(2, "code is b there, and a here"), daemon=True)
    failing.start()
    failing.join(timeout=0.5)
    assert failing.is_alive() and len(said) == 1


@one_in(2)
@pytest.mark.parametrize("present", [(0, 1), (1,)])
def test_those_that_do_not_come_are_waited_for_no_longer_than_that(present):
    with started(*((3, index, "a") for index in present), wait=2) as processes:
        for index, (code, said) in zip(present, ends(processes, within=30), strict=True):
            assert code == 2 and said.count("\n") == 1
            assert f"process {index} of 3 " in said and "first one at localhost" in said and "in 2 s" in said


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with started((2, 0, "a"), port=port) as processes:
            ((code, said),) = ends(processes, within=20)
    assert code == 2 and said.startswith(f"refused: cannot listen at port {port}")


SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_NODELIST": "gpu[017-018]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_ON_NODE": "8",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
}


@pytest.mark.parametrize(
    ("changes", "index", "devices", "expected"),
    [
        ({}, 1, tuple(range(8)), 8),
        (
            {"SLURM_NTASKS": "16", "SLURM_PROCID": "11", "SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"},
            11,
            (3,),
            1,
        ),
        (
            {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            3,
            (4, 5, 6, 7),
            4,
        ),
        # --gpus-per-task: Slurm shows every process its own.
        (
            {
                "SLURM_NTASKS": "4",
                "SLURM_PROCID": "3",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
                "CUDA_VISIBLE_DEVICES": "0,1,2,3",
            },
            3,
            None,
            4,
        ),
    ],
)
def test_under_slurm_the_processes_of_a_node_share_all_its_gpus(monkeypatch, changes, index, devices, expected):
    for name, value in (SLURM | changes).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MOE_JAX_DISTRIBUTED", "auto")
    place = job_place.find_place()
    assert place is not None and place.host == "gpu017" and place.index == index
    assert place.count == int((SLURM | changes)["SLURM_NTASKS"])
    assert (place.local_devices, job_place.expected_local_devices()) == (devices, expected)


def test_gpus_that_cannot_be_shared_evenly_are_refused(monkeypatch):
    for name, value in (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4,3(x2)"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="3 processes .* its 8 GPUs"):
        job_place._devices_of_slurm()
    for node, tasks in (("0", 4), ("1", 3), ("2", 3), ("3", 1)):
        monkeypatch.setenv("SLURM_NODEID", node)
        assert job_place._tasks_on_node() == tasks
    monkeypatch.delenv("SLURM_STEP_TASKS_PER_NODE")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x9)")
    assert job_place._tasks_on_node() == 2


def test_versions_tell_one_source_from_another(tmp_path, monkeypatch):
    found = job_place.versions()
    assert found["jax"] == jax.__version__ and re.fullmatch(r"\d+\.\d+", found["python"])
    package = tmp_path / "moe_jax"
    (package / "core").mkdir(parents=True)
    monkeypatch.setattr(job_place.moe_jax, "__file__", str(package / "__init__.py"))
    seen = {found["moe_jax"]}
    for name, content in (("__init__.py", ""), ("a.py", "1"), ("a.py", "2"), ("core/a.py", "2"), ("b.py", "")):
        (package / name).write_text(content)
        seen.add(job_place.versions()["moe_jax"])
    (package / "notes.txt").write_text("nothing that runs")
    assert job_place.versions()["moe_jax"] in seen and len(seen) == 6


@pytest.mark.parametrize(
    "value", ["localhost", "localhost:1,2", "localhost:x,2,0", "localhost:1,2,2", "localhost:99999,2,0", "a b:1,2,0"]
)
def test_a_place_that_cannot_be_is_refused(monkeypatch, value):
    monkeypatch.setenv("MOE_JAX_DISTRIBUTED", value)
    with pytest.raises(InputError, match=r"MOE_JAX_DISTRIBUTED=.*: "):
        job_place.find_place()


def test_other_variables_are_checked_too(monkeypatch):
    monkeypatch.setenv("MOE_JAX_DISTRIBUTED", "auto")
    with pytest.raises(InputError, match="this is no TPU pod, Slurm, Open MPI or Kubernetes that JAX knows"):
        job_place.find_place()
    monkeypatch.setenv("MOE_JAX_DISTRIBUTED", "[::1]:4000,2,1")
    place = job_place.find_place()
    assert place == Place("[::1]:4000", 2, 1) and (place.host, place.port) == ("::1", 4000)
    monkeypatch.setenv("MOE_JAX_DISTRIBUTED", "localhost:4000,1,0")
    assert job_place.find_place() is None
    monkeypatch.setenv("MOE_JAX_DISTRIBUTED_WAIT", "soon")
    with pytest.raises(InputError, match="MOE_JAX_DISTRIBUTED_WAIT='soon': expected seconds"):
        job_place.waits()
    monkeypatch.setenv("MOE_JAX_LOCAL_DEVICES", "0")
    with pytest.raises(InputError, match="MOE_JAX_LOCAL_DEVICES='0': expected the number"):
        job_place.expected_local_devices()
    monkeypatch.setenv("MOE_JAX_LOCAL_DEVICES", "4")
    assert job_place.expected_local_devices() == 4
