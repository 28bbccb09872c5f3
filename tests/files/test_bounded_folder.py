"""A folder of arrays: whole or not there, in bounds, shared, and never in the way."""

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.files.bounded_folder import BoundedFolder

SHAPE, FLOATS = (3, 5), np.dtype(np.float32)
BYTES = 3 * 5 * 4 + 32


def array(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_an_array_is_found_as_it_was_kept_in_its_dtype(tmp_path, dtype):
    folder, kept = BoundedFolder(tmp_path / "new" / "deep", ".x", max_bytes=10**6), array(0).astype(jnp.dtype(dtype))
    assert folder.find("a", SHAPE, kept.dtype) is None
    folder.keep("a", kept)
    found = BoundedFolder(tmp_path / "new" / "deep", ".x", max_bytes=10**6).find("a", SHAPE, kept.dtype)
    assert found.dtype == kept.dtype and found.tobytes() == kept.tobytes() and folder.keys() == ["a"]
    assert folder.find("a", (*SHAPE, 2), kept.dtype) is None


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:40] + bytes([b[40] ^ 1]) + b[41:], lambda b: b""])
def test_a_damaged_array_is_not_there_and_is_kept_anew(tmp_path, damage):
    folder = BoundedFolder(tmp_path, ".x", max_bytes=10**6)
    folder.keep("a", array(0))
    (tmp_path / "a.x").write_bytes(damage((tmp_path / "a.x").read_bytes()))
    assert folder.find("a", SHAPE, FLOATS) is None
    folder.keep("a", array(0))
    np.testing.assert_array_equal(folder.find("a", SHAPE, FLOATS), array(0))


def test_what_was_not_used_for_longest_goes_and_others_files_stay(tmp_path):
    said = []
    folder = BoundedFolder(tmp_path, ".x", max_bytes=8 * BYTES, note=said.append)
    (tmp_path / "others.txt").write_text("not ours")
    for seed in range(8):
        folder.keep(str(seed), array(seed))
        os.utime(tmp_path / f"{seed}.x", (seed + 1, seed + 1))
    assert folder.find("0", SHAPE, FLOATS) is not None  # used, and so the newest
    assert not said
    folder.keep("8", array(8))
    assert len(said) == 1 and "full" in said[0]
    assert sorted(folder.keys()) == ["0", "3", "4", "5", "6", "7", "8"]
    assert (tmp_path / "others.txt").exists()
    folder.keep("large", np.zeros((8 * BYTES, 1)))
    assert "large" not in folder.keys() and len(folder.keys()) == 7


def test_runs_that_add_little_keep_to_the_bound_together(tmp_path):
    for seed in range(40):
        BoundedFolder(tmp_path, ".x", max_bytes=20 * BYTES).keep(str(seed), array(seed))
    assert len(os.listdir(tmp_path)) <= 20


def test_a_folder_that_cannot_be_written_is_read_and_said_once(tmp_path, monkeypatch):
    said, folder = [], BoundedFolder(tmp_path, ".x", max_bytes=10**6)
    folder.keep("a", array(0))

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("utime", "replace"):
        monkeypatch.setattr(os, name, refused)
    folder = BoundedFolder(tmp_path, ".x", max_bytes=10**6, note=said.append)
    for seed in (1, 2):
        folder.keep("b", array(seed))
    np.testing.assert_array_equal(folder.find("a", SHAPE, FLOATS), array(0))
    assert folder.keys() == ["a"] and os.listdir(tmp_path) == ["a.x"]
    assert len(said) == 1 and str(tmp_path) in said[0] and "Permission denied" in said[0]


def test_a_path_that_is_no_folder_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    folder = BoundedFolder(tmp_path / "file", ".x", max_bytes=10**6, note=said.append)
    folder.keep("a", array(0))
    assert folder.find("a", SHAPE, FLOATS) is None and folder.keys() == [] and len(said) == 1


PROCESS = """
import sys, numpy as np, pathlib
from moe_jax.files.bounded_folder import BoundedFolder
folder, wrong = BoundedFolder(pathlib.Path(sys.argv[1]), ".x", max_bytes=40_000), 0
for turn in range(300):
    number = turn * int(sys.argv[2]) % 40
    found = folder.find(str(number), (50, 10), np.dtype(np.float32))
    wrong += found is not None and not (found == number).all()
    folder.keep(str(number), np.full((50, 10), number, np.float32))
sys.exit(wrong)
"""


def test_processes_share_a_folder(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path), step]) for step in ("1", "7")]
    assert [process.wait() for process in processes] == [0, 0]
    left = sorted(tmp_path.iterdir())
    assert left and all(file.suffix == ".x" for file in left)
    # Each measures the folder after every sixteenth of it that it adds.
    assert sum(file.stat().st_size for file in left) <= 40_000 * (1 + 2 / 16) + 2 * 2032
