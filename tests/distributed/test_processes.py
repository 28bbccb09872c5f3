"""Two processes that share a file system, as the hosts of a pod do."""

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from moe_jax.core.errors import InputError
from moe_jax.distributed.processes import (
    check_equal,
    first_decides,
    gathered,
    gathered_arrays,
    gathered_bytes,
    join_processes,
)
from moe_jax.distributed.sharding import merge_positions
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.environment import COMPILER_FLAGS, ROOT
from tests.support.forked import OF_MODELS, start
from tests.support.tiers import long, one_in

PROGRAM = """
import faulthandler, sys
faulthandler.dump_traceback_later(120, exit=True)  # a process that waits for the other for ever
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from pathlib import Path

folder, port, index = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, index)
from moe_jax.checkpoints.orbax_store import TrainingCheckpoints
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_dir import ModelDirectory, ModelDirectoryWriter
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig

layer = LayerConfig(attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8), mlp=FFNConfig(dim=24))
config = ModelConfig(family="llama", vocab_size=32, d_model=16, max_positions=64, layers=(layer,) * 2)
with ModelDirectoryWriter(folder / "model", config, tokenizer_files=[], lineage=[{"command": "test"}]) as writer:
    for path, spec in leaf_specs(config).items():
        writer.write({path: np.full(spec.shape, 3, spec.dtype)})
assert ModelDirectory(folder / "model").specs().keys() == leaf_specs(config).keys()

mesh = jax.make_mesh((2,), ("x",))
values = np.arange(16, dtype=np.float32).reshape(4, 4)
rows = NamedSharding(mesh, P("x"))
state = {"kernel": jax.make_array_from_callback((4, 4), rows, lambda at: values[at]), "key": jax.random.key(5)}
checkpoints = TrainingCheckpoints(folder / "run", keep=1)
for step in (1, 2):
    checkpoints.save(step, state, {"position": step})
assert checkpoints.steps() == [2]
columns = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=NamedSharding(mesh, P(None, "x")))
restored, extra = checkpoints.restore(2, {"kernel": columns, "key": jax.eval_shape(lambda: jax.random.key(0))})
(shard,) = restored["kernel"].addressable_shards
assert (np.asarray(shard.data) == values[shard.index]).all() and shard.data.shape == (4, 2)
assert jax.random.key_data(restored["key"]).tolist() == [0, 5] and extra == {"position": 2}
checkpoints.close()
print("done")
"""


def run_two(program: str, folder: Path) -> list[tuple[int, str, str]]:
    """Runs a program in two processes, with a folder, a port and its index; exit code, output and errors of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": COMPILER_FLAGS, "PYTHONPATH": str(ROOT)}
    processes = [
        start(
            [sys.executable, "-c", program, str(folder), str(port), str(index)],
            imports=OF_MODELS,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(2)
    ]
    ended = [process.communicate() for process in processes]
    return [(process.returncode, *said) for process, said in zip(processes, ended, strict=True)]


FIRST_DECIDES = """
from moe_jax.core.errors import InputError
from moe_jax.distributed.processes import first_decides, is_first_process

mine = is_first_process()
print(first_decides(lambda: {"step": 3 if mine else 4, "of": [None, "é"]}))

def fail(error):
    raise error

for error in (InputError("no"), OSError(28, "No space left on device"), FileNotFoundError("gone"), KeyError("bug")):
    try:
        first_decides(lambda: fail(error) if mine else "fine")
    except Exception as heard:
        kind = type(heard).__name__ if not isinstance(error, KeyError) else "any"
        print(kind, getattr(heard, "errno", None), str(error) in str(heard))

# A target that only one process sees is seen by all, or by none: here the first one sees it.
for seer in range(2):
    target = folder / f"seen{seer}" / sys.argv[3] / "model"
    if int(sys.argv[3]) == seer:
        target.mkdir(parents=True)
    try:
        ModelDirectoryWriter(target, config, tokenizer_files=[], lineage=[])
        print("goes on")
    except InputError as error:
        print("already exists" in str(error))
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Path, list[list[str]]]:
    """The folder of two processes that have run both programs, one after the other, and the lines that each printed."""
    folder = tmp_path_factory.mktemp("both")
    ended = run_two(PROGRAM + FIRST_DECIDES, folder)
    assert [code for code, _, _ in ended] == [0, 0], ended
    return folder, [[line for line in out.splitlines() if "[Gloo]" not in line] for _, out, _ in ended]


def test_two_processes_write_one_model_and_one_checkpoint(both):
    folder, printed = both
    assert [lines[0] for lines in printed] == ["done", "done"]
    model = ModelDirectory(folder / "model")
    assert all((model.read(path) == 3).all() for path in model.specs())
    assert sorted(path.name for path in folder.iterdir()) == ["model", "run", "seen0", "seen1"]


def test_the_first_process_decides_and_all_hear(both):
    heard = ["{'step': 3, 'of': [None, 'é']}", "InputError None True", "OSError 28 True", "FileNotFoundError None True"]
    heard += ["any None True", "True", "goes on"]
    assert [lines[1:] for lines in both[1]] == [heard, heard]


@pytest.fixture
def in_three(monkeypatch):
    """`in_three(call)`: what `call(index)` returns or raises in each of three threads, which stand for processes."""
    here, barrier, given = threading.local(), threading.Barrier(3, timeout=20), [None] * 3

    def exchanged(array):
        given[here.index] = np.asarray(array)
        barrier.wait()
        found = list(given)
        barrier.wait()
        assert len({(one.shape, one.dtype) for one in found}) == 1  # or JAX would wait for ever
        return found

    def call_of(index, call):
        here.index = index
        try:
            return call(index)
        except Exception as error:
            return error

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: here.index)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda array: np.stack(exchanged(array)))
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda array: exchanged(array)[0])

    def run(call):
        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(call_of, range(3), [call] * 3))

    return run


def test_all_hear_what_each_says_however_long_it_is(in_three):
    said = [b"", b"a" * 300, bytes(range(256)) * 20]
    assert in_three(lambda index: gathered_bytes(said[index])) == [said] * 3
    values = [None, {"é": [1.5, "x" * 99]}, 3]
    assert in_three(lambda index: gathered(values[index])) == [values] * 3
    arrays = [{}, {"a/b": np.arange(3)}, {"c": np.float32([[1, 2]]), "d": np.array("text")}]
    for found in in_three(lambda index: gathered_arrays(arrays[index])):
        assert found.keys() == {"a/b", "c", "d"}
        for own in arrays:
            assert all(
                found[name].dtype == array.dtype and np.array_equal(found[name], array) for name, array in own.items()
            )


def test_the_position_in_the_data_is_that_of_all_rows(in_three):
    positions = [[3, 2**40], [0, 0], [5, 7], [2**33, 1]]
    mine = [{0: positions[0]}, {2: positions[2], 1: positions[1]}, {3: positions[3]}]

    def state(rows):
        return {"epoch": 2, "rows": {str(row): position for row, position in rows.items()}}

    whole = state(dict(enumerate(positions)))
    assert in_three(lambda index: merge_positions(state(mine[index]), 4)) == [whole] * 3


def test_the_first_decides_or_fails_for_all(in_three):
    assert in_three(lambda index: first_decides(lambda: [index, "é" * 300])) == [[0, "é" * 300]] * 3
    for error in (InputError("no"), OSError(28, "full"), FileNotFoundError("gone"), KeyError("bug")):
        ran = []

        def fail(index, error=error, ran=ran):
            def action():
                ran.append(index)
                raise error

            return first_decides(action)

        first, *others = in_three(fail)
        assert first is error and ran == [0]
        for heard in others:
            assert type(heard) is (RuntimeError if isinstance(error, KeyError) else type(error))
            assert getattr(heard, "errno", None) == getattr(error, "errno", None)
            assert "the first process" in str(heard) and str(error) in str(heard)


def test_values_that_differ_are_named_in_all_processes(in_three):
    same = {"seed": 3, "of": {"b": 1, "a": [2]}}
    assert in_three(
        lambda index: check_equal({"seed": 3, "of": {**({"a": [2]} if index else {}), "b": 1, "a": [2]}})
    ) == ([None] * 3)
    for other, said in (
        ({**same, "seed": 4}, "seed is 4 in process 2, and 3 in the first; start"),
        (
            {**same, "seed": 4, "steps": 1, "a": 0},
            "a is 0 in process 2, and nothing in the first (and 2 more: seed, steps)",
        ),
        ({"seed": 3}, "of is nothing in process 2, and "),
        ({"seed": 4}, "(and 1 more: seed)"),
    ):
        errors = in_three(lambda index, other=other: check_equal(other if index == 2 else same))
        assert all(type(error) is InputError and said in str(error) for error in errors), errors


DIFFER = 'processes.check_equal({"seed": 3} if sys.argv[3] == "0" else {"seed": 4, "steps": 5})'

ONE_FAILS = """
import dataclasses, faulthandler, os, sys, types
faulthandler.dump_traceback_later(120, exit=True)
os.environ["MOE_JAX_DISTRIBUTED"] = f"localhost:{sys.argv[2]},2,{sys.argv[3]}"
from moe_jax.commands import cli
from moe_jax.distributed import processes
from moe_jax.core.errors import InputError

def run(options):
    processes.join_processes()
    processes.check_equal({"seed": 3})
    processes.wait_for_all("begun")
    ACTING
        ACTION
    processes.wait_for_all("which never comes")

Options = dataclasses.make_dataclass("Options", [])
sys.modules["moe_jax.commands.train"] = types.SimpleNamespace(Options=Options, run=run)
sys.exit(cli.main(["train"]))
"""


@one_in(2)
@pytest.mark.parametrize(
    ("action", "code", "own", "told"),
    [
        ('raise InputError("bad line 3")', 2, "moe-jax: error: bad line 3", "ended: bad line 3"),
        ('raise KeyError("a bug")', 1, "Traceback", "ended: KeyError: 'a bug'"),
        ("os.kill(os.getpid(), 9)", -9, "", "is gone: it was killed, or its host stopped"),
        (
            DIFFER,
            2,
            "the processes differ: seed is 4 in process 1, and 3 in the first",
            "the processes differ: seed is 4 in process 1, and 3 in the first (and 1 more: steps)",
        ),
    ],
    ids=["error", "bug", "killed", "differs"],
)
def test_what_ends_one_process_ends_the_other_and_it_says_why(tmp_path, action, code, own, told):
    """They would wait in a barrier for minutes. (The limit of the program is longer than this takes by far.)"""
    acting = "if True:" if action == DIFFER else "if int(sys.argv[3]) == 1:"
    program = ONE_FAILS.replace("ACTING", acting).replace("ACTION", action)
    begun = time.monotonic()
    (first, _, heard), (second, _, said) = run_two(program, tmp_path)
    assert second == code and own in said
    assert first == max(code, 1) and told in heard and "Traceback" not in heard and "stack" not in heard
    assert heard.count("moe-jax: error: ") == 1
    assert time.monotonic() - begun < 60


def test_a_process_that_sees_too_few_devices_is_refused(monkeypatch):
    monkeypatch.delenv("MOE_JAX_DISTRIBUTED", raising=False)
    monkeypatch.setenv("MOE_JAX_LOCAL_DEVICES", "9")
    with pytest.raises(InputError, match="8 cpu devices in 1 processes: process 0 has 8; 9 are .* each"):
        join_processes()
    monkeypatch.setenv("MOE_JAX_LOCAL_DEVICES", "8")
    join_processes()


SLURM_TASK = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(120, exit=True)
job = {"SLURM_JOB_ID": sys.argv[2], "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
job |= {"SLURM_PROCID": sys.argv[3], "SLURM_LOCALID": sys.argv[3], "SLURM_STEP_TASKS_PER_NODE": "2"}
os.environ |= job | {"SLURM_GPUS_ON_NODE": "MANY", "MOE_JAX_DISTRIBUTED": "auto"}
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
from moe_jax.commands import cli
from moe_jax.distributed import job_place
from moe_jax.distributed import processes
from moe_jax.core.errors import InputError
place = job_place.find_place()
print(place.count, place.index, list(place.local_devices))
try:
    processes.join_processes()
    print(processes.describe_devices())
    processes.leave_processes()
except InputError as error:
    cli._end(2, f"error: {error}")
"""


@long
def test_under_slurm_processes_find_each_other_and_miss_a_device(tmp_path):
    """The CPU's devices stand for GPUs, of which JAX would give each process one."""
    (code, out, said), (other, _, _) = run_two(SLURM_TASK.replace("MANY", "8"), tmp_path)
    assert (code, other) == (0, 0), said
    assert out == "2 0 [0, 1, 2, 3]\n2 processes with 4 devices each: 8 devices (cpu)\n"
    for code, _, said in run_two(SLURM_TASK.replace("MANY", "10"), tmp_path):
        assert code == 2 and "8 cpu devices in 2 processes: process 0 has 4, process 1 has 4; 5 are expected" in said
