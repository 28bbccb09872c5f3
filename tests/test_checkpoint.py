import os
import signal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax import checkpoint
from moe_jax.checkpoint import LeafReader, LeafWriter, TrainingCheckpoints
from moe_jax.errors import InputError
from tests.disks import run_python, small_disk

BITS = np.random.default_rng(0).integers(0, 256, size=1 << 15, dtype=np.uint8)


def every_dtype() -> dict[str, np.ndarray]:
    """All 65,536 patterns of the 16-bit floats, so every NaN payload too; random bits for the others."""
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    leaves = {
        "half/bfloat16": patterns.view(ml_dtypes.bfloat16),
        "half/float16": patterns.view(np.float16),
        "scalar": np.float32(-0.0).reshape(()),
        "zeros": np.zeros((3, 5), np.float32),
        "fortran": np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
        "layers/0/mask": np.array([True, False]),
    }
    for dtype in ("float32", "float64", "int32", "int8", "uint8", "int64"):
        leaves[f"layers/2/{dtype}"] = BITS.view(dtype).reshape(2, -1)
    return leaves


def write(directory, leaves) -> None:
    writer = LeafWriter(directory)
    for path, leaf in leaves.items():
        writer.write({path: leaf})
    writer.close()


def assert_same_bits(actual, expected) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    leaves = every_dtype()
    write(tmp_path / "params", leaves)
    reader = LeafReader(tmp_path / "params")
    assert reader.specs.keys() == leaves.keys()
    for path, leaf in leaves.items():
        assert (reader.specs[path].shape, reader.specs[path].dtype) == (leaf.shape, leaf.dtype)
        assert_same_bits(reader.read(path), leaf)


def test_orbax_itself_reads_the_same(tmp_path):
    leaves = every_dtype()
    write(tmp_path / "params", leaves)
    tree = checkpoint.ocp.load(tmp_path / "params")
    assert_same_bits(tree["half"]["bfloat16"], leaves["half/bfloat16"])
    assert_same_bits(tree["layers"]["2"]["int32"], leaves["layers/2/int32"])


def test_checkpoints_that_orbax_wrote_its_own_way_can_be_read(tmp_path):
    leaf = BITS.view(np.float32).reshape(4, -1)
    checkpoint.ocp.save(tmp_path / "compressed", {"a": {"b": leaf, "c": np.arange(3)}})
    reader = LeafReader(tmp_path / "compressed")
    assert_same_bits(reader.read("a/b"), leaf)
    write(tmp_path / "ours", {"a/b": leaf})
    assert LeafReader(tmp_path / "ours").specs["a/b"] == reader.specs["a/b"]


def test_jax_arrays_can_be_written(tmp_path):
    mesh = jax.make_mesh((8,), ("x",))
    array = jax.device_put(jnp.arange(16, dtype=jnp.bfloat16), NamedSharding(mesh, P("x")))
    write(tmp_path / "params", {"a": array})
    assert_same_bits(LeafReader(tmp_path / "params").read("a"), np.asarray(array))


def test_layers_come_in_the_order_of_their_numbers(tmp_path):
    write(tmp_path / "params", {f"layers/{i}/scale": np.ones(2) for i in (10, 2, 0)})
    assert list(LeafReader(tmp_path / "params").specs) == ["layers/0/scale", "layers/2/scale", "layers/10/scale"]


def test_a_caller_may_reuse_its_buffer(tmp_path):
    writer = LeafWriter(tmp_path / "params")
    buffer = np.zeros(4, np.float32)
    for i in range(3):
        buffer[:] = i
        writer.write({f"a{i}": buffer})
    writer.close()
    assert [LeafReader(tmp_path / "params").read(f"a{i}")[0] for i in range(3)] == [0, 1, 2]


def test_reading_a_leaf_touches_no_other(tmp_path):
    write(tmp_path / "params", {"a": np.ones(8), "b": np.ones(8)})
    (tmp_path / "params" / "state" / "b" / "0").unlink()
    reader = LeafReader(tmp_path / "params")
    assert reader.read("a").sum() == 8
    with pytest.raises((InputError, FileNotFoundError)):
        reader.read("b")


def test_a_truncated_leaf_is_an_error(tmp_path):
    write(tmp_path / "params", {"a": np.ones(8)})
    file = tmp_path / "params" / "state" / "a" / "0"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(InputError, match=r"61 bytes, 64 expected"):
        LeafReader(tmp_path / "params").read("a")


def test_reader_refuses_what_is_not_a_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        LeafReader(tmp_path / "absent")
    with pytest.raises(InputError, match="not a complete Orbax checkpoint"):
        LeafReader(tmp_path)
    write(tmp_path / "params", {"a": np.ones(8)})
    with pytest.raises(InputError, match="no leaf 'b'"):
        LeafReader(tmp_path / "params").read("b")


def test_writer_refuses_leaves_that_would_be_lost(tmp_path):
    writer = LeafWriter(tmp_path / "params")
    writer.write({"a/b": np.ones(2)})
    for path in ("a/b", "a", "a/b/c", "a//c", "a.b/c"):
        with pytest.raises(ValueError, match="leaf"):
            writer.write({path: np.ones(2)})
    with pytest.raises(ValueError, match="nothing to write"):
        writer.write({"empty": np.ones((0, 2))})


def test_writer_refuses_an_existing_checkpoint(tmp_path):
    write(tmp_path / "params", {"a": np.ones(2)})
    with pytest.raises(FileExistsError):
        LeafWriter(tmp_path / "params")


def test_an_interrupted_write_goes_on_at_the_leaf(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "GROUP_BYTES", 1)
    LeafWriter(tmp_path / "params").write({"a": np.ones(2), "b/c": np.zeros(2)})
    writer = LeafWriter(tmp_path / "params", resume=True)
    assert writer.done == {"a", "b/c"}
    writer.write({"d": np.ones(3)})
    writer.close()
    reader = LeafReader(tmp_path / "params")
    assert [reader.read(path).tolist() for path in reader.specs] == [[1, 1], [0, 0], [1, 1, 1]]


def test_without_resume_nothing_stale_is_taken_up(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "GROUP_BYTES", 1)
    LeafWriter(tmp_path / "params").write({"stale": np.ones(2)})
    write(tmp_path / "params", {"a": np.ones(2)})
    assert LeafReader(tmp_path / "params").specs.keys() == {"a"}
    assert [path.name for path in tmp_path.iterdir()] == ["params"]


def test_fingerprint_sees_names_dtypes_and_values(tmp_path):
    variants = [{"a": np.ones(4, np.float32)}, {"b": np.ones(4, np.float32)}, {"a": np.ones(4, np.int32)}]
    variants.append({"a": np.array([1, 1, 1, 2], np.float32)})
    for i, leaves in enumerate([*variants, variants[0]]):
        write(tmp_path / str(i), leaves)
    *different, again = (LeafReader(tmp_path / str(i)).fingerprint() for i in range(5))
    assert len(set(different)) == 4 and again == different[0]


MEMORY = """
import sys
import numpy as np
from moe_jax import checkpoint

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) >> 10

checkpoint.GROUP_BYTES = 1 << 20
writer = checkpoint.LeafWriter(sys.argv[1])
writer.write({"warm": np.ones(1 << 18)})
start = peak()
for i in range(4):
    writer.write({f"a{i}": np.full((8, 1 << 21), i, np.float32)})
writer.close()
written = peak()
reader = checkpoint.LeafReader(sys.argv[1])
for i in range(4):
    assert reader.read(f"a{i}")[7, -1] == i
print(written - start, peak() - start)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="measures memory as Linux reports it")
def test_memory_is_that_of_one_leaf(tmp_path):
    ran = run_python(MEMORY, tmp_path / "params")
    assert ran.returncode == 0, ran.stderr
    written, read = map(int, ran.stdout.split())
    # 256 MB in leaves of 64 MB. One more copy of a leaf, anywhere, would make it 128.
    assert written < 100 and read < 100


KILLED = """
import os, signal, sys
import numpy as np
from moe_jax import checkpoint

checkpoint.GROUP_BYTES = 1 << 20
writer = checkpoint.LeafWriter(sys.argv[1])
writer.write({"first": np.full(1 << 18, 7.0)})
import threading
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
for i in range(1000):
    writer.write({f"a{i}": np.full(1 << 20, i, np.float32)})
"""


def test_killed_in_the_middle_every_leaf_is_whole_or_absent(tmp_path):
    ran = run_python(KILLED, tmp_path / "params")
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    with pytest.raises(FileNotFoundError):
        LeafReader(tmp_path / "params")
    writer = LeafWriter(tmp_path / "params", resume=True)
    assert "first" in writer.done
    writer.write({"last": np.ones(2)})
    writer.close()
    reader = LeafReader(tmp_path / "params")
    assert reader.specs.keys() == writer.done
    for path in writer.done - {"first", "last"}:
        assert (reader.read(path) == float(path[1:])).all()
    assert (reader.read("first") == 7).all() and reader.read("first").size == 1 << 18


def test_a_full_disk_is_an_os_error(tmp_path):
    with small_disk(tmp_path / "disk", 6) as disk, pytest.raises(OSError, match="No space left on device"):
        write(disk / "params", {f"a{i}": np.ones(1 << 18) for i in range(4)})


LIMITED = """
import resource, sys
import jax.numpy as jnp
import numpy as np
from moe_jax import checkpoint

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    writer = checkpoint.LeafWriter(sys.argv[1] + "/params")
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
    assert not (tmp_path / "params").exists()
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
from moe_jax.checkpoint import TrainingCheckpoints

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
    with pytest.raises(InputError, match=r"c is not in the checkpoint; b is not in the model; a is float32\[3\]"):
        checkpoints.restore(1, like)
    with pytest.raises(InputError, match="no complete checkpoint of step 2; it has \\[1\\]"):
        checkpoints.restore(2, like)
    with pytest.raises(InputError, match="keep=0"):
        TrainingCheckpoints(tmp_path / "run", keep=0)
    checkpoints.close()


KILLED_TRAINING = """
import os, signal, sys, threading
import jax.numpy as jnp
from moe_jax.checkpoint import TrainingCheckpoints

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
