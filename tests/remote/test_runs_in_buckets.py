"""Training runs in a bucket: killed in the middle of a checkpoint, continued, read as models."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from moe_jax import cli
from moe_jax.errors import InputError
from moe_jax.open_source import open_source
from moe_jax.remote.remote_path import as_path
from moe_jax.train.metrics import read_metrics
from moe_jax.train.recipe import load_recipe
from moe_jax.train.remote_lines import RemoteLines, part_of, read_remote_lines
from tests.conftest import COMPILER_FLAGS, ROOT
from tests.tiers import long
from tests.train.conftest import byte_tokenizer
from tests.train.models import BANKS, FFN, config_of, moe, write_config

RECIPE = """
run_dir = "gs://bucket/run"
[model]
config = "config.json"
init = "random"
[data]
tokenizer = "tokenizer.json"
seq_len = 16
sources = [{ path = "text.txt" }]
[optimizer]
learning_rate = 1e-3
[train]
steps = 6
batch_size = 8
[checkpoint]
every = 2
keep = 2
"""
RUN = as_path("gs://bucket/run")


@pytest.fixture
def place(tmp_path, monkeypatch):
    write_config(tmp_path / "config.json", config_of(FFN, moe(BANKS["low-rank"])))
    byte_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "text.txt").write_text("".join(f"the {i}th line says {i * i}\n" for i in range(300)))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def records(path):
    # what does not depend on the clock
    return [{key: r[key] for key in ("step", "loss", "grad_norm", "tokens")} for r in read_metrics(path)]


@long
def test_a_run_is_killed_in_a_checkpoint_and_goes_on(bucket, place, capsys):
    bucket.delay = 1000  # no listing shows anything
    assert cli.main(["train", "recipe.toml", "--set", "run_dir=local"]) == 0
    flags = {"XLA_FLAGS": f"{COMPILER_FLAGS} --xla_force_host_platform_device_count=8"}
    child = subprocess.Popen(
        [sys.executable, "-m", "moe_jax.cli", "train", "recipe.toml"],
        env=os.environ | flags | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )

    def kill(request):
        if request.verb == "put" and request.name.startswith("run/checkpoints/4-") and "/c/" in request.name:
            os.kill(child.pid, signal.SIGKILL)

    bucket.fault = kill
    _, err = child.communicate()
    assert child.returncode == -signal.SIGKILL, err.decode()
    bucket.fault = None
    assert "run/model/config.json" not in bucket.names()
    capsys.readouterr()
    assert cli.main(["train", "recipe.toml"]) == 2
    assert "gs://bucket/run already exists; continue it with --resume" in capsys.readouterr().err
    assert cli.main(["train", "recipe.toml", "--resume"]) == 0
    assert "continuing after step 2" in capsys.readouterr().out
    assert records(RUN / "metrics.jsonl") == records(place / "local" / "metrics.jsonl")
    here, there = open_source("local/model"), open_source("gs://bucket/run/model")
    for name in here.specs():
        np.testing.assert_array_equal(there.read(name), here.read(name))
    assert {file.name for file in there.tokenizer_files} == {"tokenizer.json"}
    # Checkpoints are models too.
    saved = open_source("gs://bucket/run@6")
    for name in here.specs():
        np.testing.assert_array_equal(saved.read(name), here.read(name))
    bucket.delay = 0
    with pytest.raises(InputError, match="gs://bucket/run is a training run and not a model; give gs://bucket/run/model"):
        open_source("gs://bucket/run")
    assert cli.main(["train", "recipe.toml", "--resume", "--set", "train.steps=8"]) == 0  # the model is replaced
    assert [record["step"] for record in records(RUN / "metrics.jsonl")] == list(range(1, 9))
    # The two last ones are kept, and nothing of the one that was not finished.
    folders = {name.split("/")[2] for name in bucket.names() if name.startswith("run/checkpoints/")}
    assert sorted(folder.split("-")[0] for folder in folders) == [".attempt", "6", "8", "steps.json"]


def test_what_cannot_be_done_in_a_bucket(bucket, place, capsys):
    with pytest.raises(InputError, match="gs://bucket/run is in a bucket, where log.profile_steps cannot write"):
        load_recipe("recipe.toml", ["log.profile_steps=[1,2]"])
    for arguments in (["--restart", "gs://bucket/run@2"], ["--restart", "local@2"]):
        assert cli.main(["train", "recipe.toml", *arguments]) == 2
        assert "is in a bucket; a run is restarted from a disk to a disk" in capsys.readouterr().err
    bucket.fault = lambda request: 403 if request.verb == "put" else None
    assert cli.main(["train", "recipe.toml"]) == 2
    assert "no permission (status 403)" in capsys.readouterr().err
    assert bucket.names() == []


def test_lines_that_grow(bucket, monkeypatch):
    monkeypatch.setattr(sys.modules[RemoteLines.__module__], "_PART_BYTES", 20)
    path = as_path("gs://bucket/run/metrics.jsonl")
    lines = [f"{{{i:03}}}\n" for i in range(20)]
    writer = RemoteLines(path, lines[:3])
    for line in lines[3:]:
        writer.write(line)
    assert len(read_remote_lines(path)) < 120  # the last part is not due
    writer.close()
    assert read_remote_lines(path).decode() == "".join(lines) and part_of(path, 3).is_file()
    RemoteLines(path, lines[:5]).close()
    assert read_remote_lines(path).decode() == "".join(lines[:5])
