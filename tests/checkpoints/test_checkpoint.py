"""What a training run needs to go on: on any number of devices, after being killed, on a full disk."""

import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.checkpoints import orbax_store
from moe_jax.checkpoints.orbax_store import TrainingCheckpoints
from moe_jax.checkpoints.saved_state import read_steps
from moe_jax.core.errors import InputError
from moe_jax.files.storage_path import as_path
from tests.checkpoints.test_leaf_files import BITS, assert_same_bits
from tests.support.disks import run_python

LIMITED = """
import resource, sys
import jax.numpy as jnp
import numpy as np
from moe_jax.checkpoints import orbax_store as checkpoint
from moe_jax.checkpoints import leaf_files

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    writer = leaf_files.LeafWriter(sys.argv[1] + "/params", [f"a{i}" for i in range(8)])
    writer.write({f"a{i}": np.ones(1 << 18) for i in range(8)})
    writer.close()
except OSError as error:
    print(error.strerror)
checkpoints = checkpoint.TrainingCheckpoints(sys.argv[1] + "/run", keep=2)
checkpoints.save(1, {"a": jnp.ones(4)}, {})
try:
    checkpoints.save(2, {"a": jnp.arange(1 << 20)}, {})
    checkpoints.wait()
except OSError as error:
    print(error.strerror)
print(checkpoints.steps())
"""


def test_a_write_that_fails_is_an_os_error_and_leaves_the_last_checkpoint(tmp_path):
    ran = run_python(LIMITED, tmp_path)
    assert ran.stdout.splitlines() == ["File too large", "File too large", "[1]"], ran.stderr
    assert not (tmp_path / "params" / "_CHECKPOINT_METADATA").exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["1"]
    # The threads of Orbax print a traceback each; the user sees the error that is raised, once.
    assert "Traceback" not in ran.stderr


def mesh_of(*shape: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], devices=devices)


def training_state(mesh: jax.sharding.Mesh) -> dict:
    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    return {
        "params": {"kernel": put(jnp.asarray(BITS.view(np.float32)[:4096].reshape(64, 64)), "x", "y")},
        "moments": [put(jnp.arange(64, dtype=jnp.bfloat16), "x"), put(jnp.arange(8, dtype=jnp.int8))],
        "step": put(jnp.int32(41)),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(5, impl="rbg"), 8),
    }


def abstract(state, sharding=None):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state)


def assert_same_state(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert_same_bits(np.asarray(one), np.asarray(other))


def test_what_each_process_holds_alone_goes_through_the_host(monkeypatch):
    array = jnp.arange(3, dtype=jnp.float32)
    assert orbax_store._plain(array) is array  # nothing is copied where one process holds all
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert type(orbax_store._plain(array)) is np.ndarray  # Orbax takes no array that is local to one of several
    over_all = types.SimpleNamespace(dtype=array.dtype, is_fully_addressable=False)
    assert orbax_store._plain(over_all) is over_all


def test_steps_are_in_the_order_of_their_numbers(tmp_path):
    for name in ("100", "20", "3", "100.tmp", "three"):
        (tmp_path / name).mkdir()
    (tmp_path / "7").touch()
    assert list(read_steps(as_path(tmp_path)).items()) == [(step, tmp_path / str(step)) for step in (3, 20, 100)]


def test_the_path_of_a_run_is_no_pattern(tmp_path):
    state = {"kernel": jnp.arange(8.0), "key": jax.random.key(3)}
    checkpoints = TrainingCheckpoints(tmp_path / "run[1]" / "a*b", keep=2)
    for step in (1, 2):
        checkpoints.save(step, state, {"position": step})
    checkpoints.close()
    checkpoints = TrainingCheckpoints(tmp_path / "run[1]" / "a*b", keep=2)
    assert checkpoints.steps() == [1, 2]
    restored, extra = checkpoints.restore(2, abstract(state))
    assert_same_state(restored, state)
    assert extra == {"position": 2}
    checkpoints.close()


def test_training_state_goes_from_8_devices_to_1_and_back(tmp_path):
    state = training_state(mesh_of(2, 4))
    extra = {"data": {"position": 12, "files": ["a", "b"]}, "loss": 0.1}
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    checkpoints = TrainingCheckpoints(tmp_path / "run", keep=2)
    checkpoints.save(1, state, extra)
    on_one, restored_extra = checkpoints.restore(1, abstract(state, one_device))
    assert_same_state(on_one, state)
    assert restored_extra == extra
    assert on_one["params"]["kernel"].sharding == one_device
    checkpoints.save(2, on_one, {})
    like = abstract(state)
    wide = NamedSharding(mesh_of(8), P("x"))
    like["params"]["kernel"] = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=wide)
    on_eight, _ = checkpoints.restore(2, like)
    assert_same_state(on_eight, state)
    assert on_eight["params"]["kernel"].sharding == wide
    checkpoints.close()


RESTORE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from moe_jax.checkpoints.orbax_store import TrainingCheckpoints

assert jax.device_count() == 1
like = {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.float32), "key": jax.eval_shape(lambda: jax.random.key(0))}
state, extra = TrainingCheckpoints(sys.argv[1], keep=2).restore(7, like)
np.save(sys.argv[2], state["kernel"])
print(jax.random.key_data(state["key"]).tolist(), extra)
"""


def test_a_checkpoint_of_8_devices_restores_where_there_is_one(tmp_path):
    state = training_state(mesh_of(8, 1))
    checkpoints = TrainingCheckpoints(tmp_path / "run", keep=2)
    checkpoints.save(7, {"kernel": state["params"]["kernel"], "key": state["key"]}, {"position": 3})
    checkpoints.close()
    ran = run_python(RESTORE, tmp_path / "run", tmp_path / "kernel.npy")
    assert ran.stdout.strip() == "[0, 3] {'position': 3}", ran.stderr
    assert_same_bits(np.load(tmp_path / "kernel.npy"), np.asarray(state["params"]["kernel"]))


def test_the_last_n_are_kept(tmp_path):
    checkpoints = TrainingCheckpoints(tmp_path / "run", keep=2)
    assert checkpoints.latest_step() is None
    for step in (1, 5, 9):
        checkpoints.save(step, {"a": jnp.full(3, step)}, {})
    assert checkpoints.steps() == [5, 9] and checkpoints.latest_step() == 9
    checkpoints.close()
    again = TrainingCheckpoints(tmp_path / "run", keep=2)
    assert again.steps() == [5, 9]
    assert again.restore(5, {"a": jax.ShapeDtypeStruct((3,), jnp.int32)})[0]["a"].tolist() == [5, 5, 5]
    again.close()


def test_buffers_may_be_donated_while_a_checkpoint_is_written(tmp_path):
    add = jax.jit(lambda array: array + 1, donate_argnums=0)
    array = add(jnp.zeros(1 << 21))
    checkpoints = TrainingCheckpoints(tmp_path / "run", keep=1)
    checkpoints.save(1, {"a": array}, {})
    for _ in range(5):
        array = add(array)
    restored, _ = checkpoints.restore(1, {"a": jax.ShapeDtypeStruct(array.shape, array.dtype)})
    assert (np.asarray(restored["a"]) == 1).all()
    checkpoints.close()


def test_unfinished_checkpoints_do_not_count(tmp_path):
    checkpoints = TrainingCheckpoints(tmp_path / "run", keep=5)
    checkpoints.save(1, {"a": jnp.ones(3)}, {})
    checkpoints.close()
    (tmp_path / "run" / "1").rename(tmp_path / "run" / "2.orbax-checkpoint-tmp")
    again = TrainingCheckpoints(tmp_path / "run", keep=5)
    assert again.steps() == []
    assert not list((tmp_path / "run").iterdir())
    again.close()


def test_a_checkpoint_that_does_not_fit_says_where(tmp_path):
    checkpoints = TrainingCheckpoints(tmp_path / "run", keep=1)
    checkpoints.save(1, {"a": jnp.ones(3), "b": jnp.ones(3)}, {})
    like = {"a": jax.ShapeDtypeStruct((4,), jnp.float32), "c": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(InputError, match=r"c is .*; b is .*; a is float32\[3\]"):
        checkpoints.restore(1, like)
    with pytest.raises(InputError, match=r"step 2; it has \[1\]"):
        checkpoints.restore(2, like)
    with pytest.raises(InputError, match="keep=0"):
        TrainingCheckpoints(tmp_path / "run", keep=0)
    checkpoints.close()


KILLED_TRAINING = """
import os, signal, sys, threading
import jax.numpy as jnp
from moe_jax.checkpoints.orbax_store import TrainingCheckpoints

checkpoints = TrainingCheckpoints(sys.argv[1], keep=3)
checkpoints.save(1, {"a": jnp.full(1 << 22, 1)}, {"position": 1})
checkpoints.wait()
threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
for step in range(2, 1000):
    checkpoints.save(step, {"a": jnp.full(1 << 22, step)}, {"position": step})
"""


def test_killed_while_saving_the_last_complete_checkpoint_counts(tmp_path):
    ran = run_python(KILLED_TRAINING, tmp_path / "run")
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    checkpoints = TrainingCheckpoints(tmp_path / "run", keep=3)
    step = checkpoints.latest_step()
    assert step is not None
    state, extra = checkpoints.restore(step, {"a": jax.ShapeDtypeStruct((1 << 22,), jnp.int32)})
    assert extra == {"position": step} and (np.asarray(state["a"]) == step).all()
    checkpoints.close()
