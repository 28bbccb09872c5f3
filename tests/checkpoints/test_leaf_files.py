"""Named leaves on disk: bit for bit, one at a time, whole or absent."""

import os
import signal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as orbax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.checkpoints import orbax_store as checkpoint
from moe_jax.checkpoints.leaf_files import LeafReader, LeafWriter
from moe_jax.core.errors import InputError
from tests.support.disks import run_python, small_disk

BITS = np.random.default_rng(0).integers(0, 256, size=1 << 15, dtype=np.uint8)


def every_dtype() -> dict[str, np.ndarray]:
    """All 65,536 patterns of the 16-bit floats, so every NaN payload too; random bits for the others."""
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    leaves = {
        "half/bfloat16": patterns.view(ml_dtypes.bfloat16),
        "half/float16": patterns.view(np.float16),
        "eighth/float8_e5m2": BITS.view(ml_dtypes.float8_e5m2),
        "eighth/float8_e4m3fn": BITS.view(ml_dtypes.float8_e4m3fn),
        "scalar": np.float32(-0.0).reshape(()),
        "zeros": np.zeros((3, 5), np.float32),
        "fortran": np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
        "layers/0/mask": np.array([True, False]),
    }
    for dtype in ("float32", "float64", "int32", "int8", "uint8", "int64"):
        leaves[f"layers/2/{dtype}"] = BITS.view(dtype).reshape(2, -1)
    return leaves


def write(directory, leaves) -> None:
    writer = LeafWriter(directory, leaves)
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


def test_the_checkpointers_that_users_of_orbax_know_read_it_too(tmp_path):
    leaves = every_dtype()
    write(tmp_path / "params", leaves)
    state = tmp_path / "params" / "state"
    tree = orbax.StandardCheckpointer().restore(state)
    restored = {jax.tree_util.keystr(p, simple=True, separator="/"): a for p, a in jax.tree.leaves_with_path(tree)}
    assert restored.keys() == leaves.keys()
    for path, leaf in leaves.items():
        assert_same_bits(restored[path], leaf)
    # A part of it, onto devices.
    split = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
    target = {"half": {"bfloat16": jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=split)}}
    arguments = orbax.args.PyTreeRestore(
        target, restore_args=orbax.checkpoint_utils.construct_restore_args(target), partial_restore=True
    )
    array = orbax.PyTreeCheckpointer().restore(state, args=arguments)["half"]["bfloat16"]
    assert array.sharding == split
    assert_same_bits(np.asarray(array), leaves["half/bfloat16"])


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
    writer = LeafWriter(tmp_path / "params", ["a0", "a1", "a2"])
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
    with pytest.raises(InputError, match="complete Orbax checkpoint"):
        LeafReader(tmp_path)
    write(tmp_path / "params", {"a": np.ones(8)})
    with pytest.raises(InputError, match="no leaf 'b'"):
        LeafReader(tmp_path / "params").read("b")


def test_an_interrupted_write_goes_on_at_the_leaf(tmp_path):
    paths = ["a", "b/c", "d", "e"]
    first = LeafWriter(tmp_path / "params", paths)
    first.write({"a": np.ones(2), "b/c": np.zeros(2), "e": np.ones(4)})
    (tmp_path / "params" / "state" / "e" / "0").write_bytes(b"cut")
    writer = LeafWriter(tmp_path / "params", paths)
    assert writer.done == {"a", "b/c"}
    writer.write({"d": np.ones(3), "e": np.zeros(4)})
    writer.close()
    reader = LeafReader(tmp_path / "params")
    assert [reader.read(path).tolist() for path in reader.specs] == [[1, 1], [0, 0], [1, 1, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("content", [b"", b"{", b'{"shape": 3}'])
def test_a_leaf_whose_shape_was_not_written_is_written_again(tmp_path, content):
    LeafWriter(tmp_path / "params", ["a"]).write({"a": np.ones(2)})
    (tmp_path / "params" / "state" / "a" / ".zarray").write_bytes(content)
    assert not LeafWriter(tmp_path / "params", ["a"]).done


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
from moe_jax.checkpoints.leaf_files import LeafReader, LeafWriter

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) >> 10

writer = LeafWriter(sys.argv[1], ["warm", "a0", "a1", "a2", "a3"])
writer.write({"warm": np.ones(1 << 18)})
start = peak()
for i in range(4):
    writer.write({f"a{i}": np.full((8, 1 << 21), i, np.float32)})
writer.close()
written = peak()
reader = LeafReader(sys.argv[1])
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
from moe_jax.checkpoints.leaf_files import LeafWriter

writer = LeafWriter(sys.argv[1], ["first", *(f"a{i}" for i in range(1000))])
writer.write({"first": np.full(1 << 18, 7.0)})
import threading
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
for i in range(1000):
    writer.write({f"a{i}": np.full(1 << 20, i, np.float32)})
"""


def test_killed_in_the_middle_every_leaf_is_whole_or_absent(tmp_path):
    ran = run_python(KILLED, tmp_path / "params")
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    with pytest.raises(InputError, match="complete Orbax checkpoint"):
        LeafReader(tmp_path / "params")
    done = LeafWriter(tmp_path / "params", ["first", *(f"a{i}" for i in range(1000))]).done
    assert "first" in done and len(done) < 1000
    writer = LeafWriter(tmp_path / "params", [*done, "last"])
    writer.write({"last": np.ones(2)})
    writer.close()
    reader = LeafReader(tmp_path / "params")
    assert reader.specs.keys() == writer.done
    for path in done - {"first"}:
        assert (reader.read(path) == float(path[1:])).all()
    assert (reader.read("first") == 7).all() and reader.read("first").size == 1 << 18


def test_a_full_disk_is_an_os_error(tmp_path):
    with small_disk(tmp_path / "disk", 6) as disk, pytest.raises(OSError, match="left on device"):
        write(disk / "params", {f"a{i}": np.ones(1 << 18) for i in range(4)})
