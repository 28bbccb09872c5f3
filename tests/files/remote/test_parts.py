"""Parts of leaves: what is read of a file is what was asked for, and no more."""

import jax
import numpy as np
import pytest

from moe_jax.checkpoints.leaf_files import LeafReader, LeafWriter
from moe_jax.checkpoints.orbax_store import read_leaf
from moe_jax.core.errors import InputError
from moe_jax.files import regular_files
from moe_jax.files.regular_files import hold, read_box
from moe_jax.files.storage_path import as_path

BOXES = [
    ((4, 6, 8), (slice(0, 4), slice(0, 6), slice(0, 8))),
    ((4, 6, 8), (slice(1, 3), slice(0, 6), slice(0, 8))),
    ((4, 6, 8), (slice(1, 3), slice(2, 5), slice(0, 8))),
    ((4, 6, 8), (slice(1, 3), slice(2, 5), slice(3, 4))),
    ((4, 6, 8), (slice(2, 3), slice(0, 6), slice(4, 8))),
    ((5,), (slice(1, 4),)),
    ((), ()),
]


def where(place, tmp_path):
    return tmp_path if place == "disk" else as_path("gs://bucket/folder")


@pytest.mark.parametrize("place", ["disk", "bucket"])
@pytest.mark.parametrize(("shape", "box"), BOXES)
def test_a_box_of_a_file(bucket, tmp_path, place, shape, box):
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    folder = where(place, tmp_path)
    (folder / "file").write_bytes(array.tobytes())
    out = np.empty_like(array[box])
    before = regular_files.traffic_so_far()
    read_box(hold(folder), "file", shape, box, out)
    np.testing.assert_array_equal(out, array[box])
    if place == "disk":
        assert (regular_files.traffic_so_far() - before).read == out.nbytes


def test_in_a_bucket_near_runs_are_one_request(bucket):
    array = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    folder = as_path("gs://bucket/folder")
    (folder / "file").write_bytes(array.tobytes())
    out = np.empty((1024, 16), np.float32)
    read_box(hold(folder), "file", array.shape, (slice(0, 1024), slice(16, 32)), out)
    np.testing.assert_array_equal(out, array[:, 16:32])
    assert len(bucket.requests) == 2


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_a_leaf_in_chunks(bucket, tmp_path, place):
    """Written by shards, read whole and in part, by us and (from a disk) by Orbax; known again however it is cut."""
    array = np.random.default_rng(0).standard_normal((8, 512, 256)).astype(np.float32)
    folder = where(place, tmp_path) / "params"
    writer = LeafWriter(folder, ["a/kernel", "b"]) if place == "disk" else _remote_writer(folder)
    grid = (4, 512, 64)
    shards = [((i, 0, j), array[4 * i : 4 * i + 4, :, 64 * j : 64 * j + 64]) for i in range(2) for j in range(4)]
    writer.write_shards("a/kernel", jax.ShapeDtypeStruct(array.shape, array.dtype), grid, shards)
    writer.write({"b": array})
    writer.close()
    reader = LeafReader(folder)
    reader.check_sizes()
    for name in ("a/kernel", "b"):
        np.testing.assert_array_equal(reader.read(name), array)
        for part in [(slice(1, 7), slice(3, 400), slice(60, 130)), (slice(0, 8), slice(0, 512), slice(192, 256))]:
            np.testing.assert_array_equal(reader.read_part(name, part), array[part])
    samples = {reader._raw[name].sample() for name in ("a/kernel", "b")}
    assert len(samples) == 1
    if place == "disk":
        np.testing.assert_array_equal(read_leaf(folder, "a/kernel"), array)
        before = regular_files.traffic_so_far()
        part = reader.read_part("b", (slice(0, 8), slice(0, 512), slice(64, 128)))
        assert (regular_files.traffic_so_far() - before).read == part.nbytes


def test_a_chunk_that_is_missing_or_short(tmp_path):
    array = np.ones((4, 8), np.float32)
    writer = LeafWriter(tmp_path / "params", ["a"])
    shards = [((0, j), array[:, 4 * j : 4 * j + 4]) for j in range(2)]
    writer.write_shards("a", jax.ShapeDtypeStruct(array.shape, array.dtype), (4, 4), shards)
    writer.close()
    file = tmp_path / "params" / "state" / "a" / "0.1"
    file.write_bytes(b"short")
    for read in (lambda r: r.read("a"), lambda r: r.check_sizes()):
        with pytest.raises(InputError, match="0.1 has 5 bytes, 64 expected: it .* corrupt"):
            read(LeafReader(tmp_path / "params"))
    file.unlink()
    with pytest.raises(InputError, match="0.1 is missing"):
        LeafReader(tmp_path / "params").check_sizes()


def _remote_writer(folder):
    class Marks:
        def mark(self, name):
            pass

        def marked(self, names):
            return []

    return LeafWriter(folder, ["a/kernel", "b"], marks=Marks())
