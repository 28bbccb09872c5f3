"""The connection between the processes of a job: small programs without JAX, which come, wait and end in many ways."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from moe_jax.core.errors import InputError
from moe_jax.distributed import job_place
from moe_jax.distributed.peers import Peers, Place
from tests.support.environment import ROOT
from tests.support.tiers import one_in

PROGRAM = """
import sys, time
from moe_jax.core.errors import InputError
from moe_jax.distributed.peers import Peers, Place

port, count, index, silence, action = sys.argv[1:]
peers = Peers(Place("localhost:" + port, int(count), int(index)), {"code": "abc"}, wait=20, silence=float(silence))
peers.join()
print("joined", flush=True)
line = sys.stdin.readline().strip()
if line == "fail":
    peers.fail(2, "line 3 is bad\\x1b[2J")
    peers.fail(1, "said again, when what was begun is put away")
    print("moe-jax: error: line 3 is bad", file=sys.stderr)
    sys.exit(2)
if line == "meet":
    for number in range(3):
        peers.meet()
        print("met", number, flush=True)
    time.sleep(60)
if line == "tell":
    peers.tell_first({"layer": int(index), "figures": [1.5, None]})
    time.sleep(60)
if line == "hear":
    heard = peers.news(0.0)
    while len(heard) < 2:
        heard += peers.news(20.0)
    print(sorted(heard, key=str), peers.news(0.0), flush=True)
    time.sleep(60)
if line == "finish":
    peers.finish()
    print("finished", flush=True)
    sys.exit(0)
if line == "wait for the first":
    peers.wait_for_first()
    print("the first is done", flush=True)
    sys.exit(0)
time.sleep(60)
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def job(count: int, silence: float = 60) -> Iterator[list[subprocess.Popen]]:
    """Processes that have all come, and wait for a line that says what they do."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port), str(count), str(index), str(silence), ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        for index in range(count)
    ]
    try:
        assert [process.stdout.readline() for process in processes] == ["joined\n"] * count
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def tell(process: subprocess.Popen, line: str) -> None:
    process.stdin.write(line + "\n")
    process.stdin.flush()


def ends(processes: Sequence[subprocess.Popen], within: float) -> list[tuple[int, str]]:
    """Exit codes and what was said on standard error."""
    end = time.monotonic() + within
    ended = []
    for process in processes:
        process.wait(max(0.1, end - time.monotonic()))
        ended.append((process.returncode, process.stderr.read()))
    return ended


@pytest.mark.parametrize("victim", [0, 2])
def test_all_end_at_once_when_one_is_killed(victim):
    with job(3) as processes:
        processes[victim].kill()
        others = [process for index, process in enumerate(processes) if index != victim]
        for code, said in ends(others, within=10):
            name = f"process {victim} ({victim + 1} of 3, on {socket.gethostname()})"
            expected = f"moe-jax: error: {name} is gone: it was killed, or its host stopped; this process ends too\n"
            assert (code, said) == (1, expected)


@pytest.mark.parametrize("victim", [0, 1])
def test_all_end_when_one_is_not_heard_of(victim):
    """As when a host loses its power: the connection is not closed."""
    with job(2, silence=1.5) as processes:
        processes[victim].send_signal(signal.SIGSTOP)
        ((code, said),) = ends([processes[1 - victim]], within=10)
        assert code == 1 and "has said nothing for 2 s" in said and said.count("\n") == 1


def test_those_that_speak_are_not_taken_to_be_dead():
    with job(2, silence=0.6) as processes:
        time.sleep(1.5)
        assert [process.poll() for process in processes] == [None, None]


@one_in(2)
@pytest.mark.parametrize("index", [1, 0])
def test_what_one_says_before_it_ends_all_say(index):
    with job(3) as processes:
        tell(processes[index], "fail")
        codes = ends(processes, within=10)
        for other, (code, said) in enumerate(codes):
            assert code == 2 and "line 3 is bad" in said and said.count("\n") == 1
            if other != index:
                assert f"process {index} ({index + 1} of 3, on " in said and "\x1b" not in said


def test_nobody_passes_a_meeting_before_all_have_come():
    with job(3) as processes:
        for process in processes[:2]:
            tell(process, "meet")
        assert select.select([process.stdout for process in processes], [], [], 1.0)[0] == []
        tell(processes[2], "meet")
        for process in processes:
            assert [process.stdout.readline() for _ in range(3)] == [f"met {number}\n" for number in range(3)]


def test_the_first_hears_what_the_others_have_done():
    with job(3) as processes:
        for process, line in zip(processes, ["hear", "tell", "tell"], strict=True):
            tell(process, line)
        told = [{"layer": index, "figures": [1.5, None]} for index in (1, 2)]
        assert processes[0].stdout.readline() == f"{sorted(told, key=str)} []\n"


def test_one_that_is_done_is_not_missed():
    with job(3) as processes:
        for process in processes[1:]:
            tell(process, "finish")
        assert ends(processes[1:], within=10) == [(0, ""), (0, "")]
        time.sleep(0.3)
        assert processes[0].poll() is None
        tell(processes[0], "finish")
        assert ends(processes[:1], within=10) == [(0, "")]


def test_the_others_wait_for_the_first():
    with job(3) as processes:
        for process in processes[1:]:
            tell(process, "wait for the first")
        time.sleep(0.5)
        assert [process.poll() for process in processes] == [None] * 3
        tell(processes[0], "finish")
        assert ends(processes, within=10) == [(0, "")] * 3
        assert processes[1].stdout.read() == "the first is done\n"


def refusals(*said: tuple[Place, dict[str, str]], wait: float = 5) -> list[str]:
    """What processes hear that come here, in threads."""
    heard = [""] * len(said)

    def come(number: int) -> None:
        place, equal = said[number]
        try:
            Peers(place, equal, wait=wait, silence=30).join()
        except InputError as error:
            heard[number] = str(error)

    threads = [threading.Thread(target=come, args=(number,)) for number in range(len(said))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def test_processes_that_differ_are_refused_and_all_hear_why():
    address = f"localhost:{free_port()}"
    heard = refusals(
        (Place(address, 3, 0), {"moe_jax": "0.1.0 (source aa)", "jax": "1"}),
        (Place(address, 3, 1), {"moe_jax": "0.1.0 (source bb)", "jax": "1"}),
        (Place(address, 3, 2), {"moe_jax": "0.1.0 (source aa)", "jax": "1"}),
    )
    expected = (
        f"process 1 (on {socket.gethostname()}) and the first do not fit: moe_jax is 0.1.0 (source bb) there, and "
        "0.1.0 (source aa) here"
    )
    assert heard == [expected] * 3


def test_a_place_is_taken_once():
    address = f"localhost:{free_port()}"
    heard = refusals((Place(address, 3, 0), {}), (Place(address, 3, 1), {}), (Place(address, 3, 1), {}))
    assert len(set(heard)) == 1 and "process 1 (on " in heard[0] and "is there already" in heard[0]


def test_the_number_of_processes_is_the_same_for_all():
    address = f"localhost:{free_port()}"
    heard = refusals((Place(address, 2, 0), {}), (Place(address, 4, 1), {}))
    assert len(set(heard)) == 1 and "number of processes is 4 there, and 2 here" in heard[0]


def test_those_that_do_not_come_are_waited_for_no_longer_than_that():
    address = f"localhost:{free_port()}"
    begun = time.monotonic()
    missing = "of 3 processes, these did not come in 1 s: 2 (they count from 0)"
    assert refusals((Place(address, 3, 0), {}), (Place(address, 3, 1), {}), wait=1) == [missing] * 2
    (alone,) = refusals((Place(f"localhost:{free_port()}", 2, 1), {}), wait=1)
    assert "process 1 of 2 could not reach the first one at localhost:" in alone and "in 1 s" in alone
    (nowhere,) = refusals((Place("nowhere.invalid:4000", 2, 1), {}), wait=1)
    assert "at nowhere.invalid:4000" in nowhere
    assert time.monotonic() - begun < 15


def test_something_else_at_the_address_is_no_first_process():
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.recv(100)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        (heard,) = refusals((Place(f"localhost:{port}", 2, 1), {}), wait=1)
        assert "what answers there is no process of this library" in heard
        (taken,) = refusals((Place(f"localhost:{port}", 2, 0), {}), wait=1)
        assert f"cannot listen at port {port}" in taken
        server.shutdown(socket.SHUT_RDWR)


def test_strangers_do_not_disturb_those_who_wait():
    address = f"localhost:{free_port()}"

    def disturb() -> None:
        time.sleep(0.2)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"moe_jax {}\n", b'moe_jax {"index": "x"}\n', b"moe_jax []\n", b"mo"):
            with socket.create_connection(("localhost", int(address.partition(":")[2]))) as connection:
                connection.sendall(said)

    threading.Thread(target=disturb).start()
    late = threading.Event()
    heard = []

    def come_late() -> None:
        time.sleep(0.6)
        heard.extend(refusals((Place(address, 2, 1), {})))
        late.set()

    threading.Thread(target=come_late).start()
    assert refusals((Place(address, 2, 0), {})) == [""]
    assert late.wait(10) and heard == [""]


@pytest.mark.parametrize("asks", [0, 1, 2])
def test_all_stop_after_the_same_step(asks):
    """Each in a thread, as far ahead of the others as steps that are computed together let it be."""
    address = f"localhost:{free_port()}"
    place = [Place(address, 3, index) for index in range(3)]
    together, stopped = threading.Barrier(3), [(0, 0)] * 3

    def work(index: int) -> None:
        peers = Peers(place[index], {}, wait=20, silence=30)
        peers.join()
        for step in range(1, 1000):
            if index == asks and step == 5:
                peers.ask_to_stop(15)
            number = peers.stop_after(step)
            if number is not None:
                stopped[index] = (step, number)
                return
            time.sleep(0.01 * (index == 2))
            together.wait(20)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    step, number = stopped[0]
    assert stopped == [stopped[0]] * 3 and number == 15 and 5 < step < 20


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
