"""The folder of compiled programs that commands keep."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_jax.commands import environment as compiled_programs
from moe_jax.commands.environment import CACHE_FOLDER, LEAST_SECONDS, keep_compiled_programs
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.disks import ROOT


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where a user's cache is, with neither variable set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (CACHE_FOLDER, LEAST_SECONDS):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards, whatever is done to it
        monkeypatch.delenv(name)
    return tmp_path / "cache"


def test_programs_are_kept_under_the_users_cache(cache):
    folder = keep_compiled_programs()
    assert folder is not None and folder.is_dir() and folder.parent == cache / "moe_jax" / "compiled"
    assert os.environ[CACHE_FOLDER] == str(folder) and os.environ[LEAST_SECONDS] == "0"


def test_what_the_user_chose_is_left(cache, monkeypatch):
    monkeypatch.setenv(CACHE_FOLDER, "/chosen")
    assert keep_compiled_programs() is None and os.environ[CACHE_FOLDER] == "/chosen"
    monkeypatch.setenv(CACHE_FOLDER, "")
    assert keep_compiled_programs() is None and CACHE_FOLDER not in os.environ
    assert not cache.exists()


def test_a_folder_that_cannot_be_made_is_no_error(cache):
    cache.write_text("a file")
    assert keep_compiled_programs() is None and CACHE_FOLDER not in os.environ


def test_what_was_used_longest_ago_is_removed(cache, monkeypatch):
    folder = keep_compiled_programs()
    for age, name in enumerate(("new", "old", "older")):
        (folder / f"{name}-cache").write_bytes(bytes(10))
        os.utime(folder / f"{name}-cache", (1e9 - age, 1e9 - age))
    monkeypatch.delenv(CACHE_FOLDER)
    monkeypatch.setattr(compiled_programs, "MOST_BYTES", 25)
    keep_compiled_programs()
    assert sorted(file.name for file in folder.iterdir()) == ["new-cache", "old-cache"]


def test_a_command_that_is_run_again_compiles_nothing(cache, tmp_path):
    """Each in a process of its own; JAX logs what it compiles and what it finds."""
    config = dense_config(num_layers=1)
    model = write_model(tmp_path / "model", config, random_leaves(config))
    command = [
        sys.executable,
        "-m",
        "moe_jax.commands.cli",
        "generate",
        str(model),
        "--ids",
        "1,2",
        "--max-new-tokens",
        "3",
    ]
    environment = {**os.environ, "JAX_LOGGING_LEVEL": "DEBUG", "PYTHONPATH": str(ROOT)}
    missed, printed = [], []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
        missed.append(done.stderr.count("PERSISTENT COMPILATION CACHE MISS"))
        printed.append(done.stdout)
    assert missed[0] > 0 == missed[1]
    assert printed[0] == printed[1]
    assert list(Path(cache).glob("moe_jax/compiled/*/*-cache"))
