"""Training runs in a bucket: killed in the middle of a checkpoint, continued, read as models."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.files.objects import GrowingObjects
from moe_jax.files.storage_path import as_path
from moe_jax.training.metrics import read_metrics
from moe_jax.training.restart import copy_checkpoint, find_origin, write_restart
from moe_jax.training.run_directory import saved_steps
from tests.files.remote.kills import killed_at, no_waiting  # noqa: F401
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.environment import COMPILER_FLAGS, ROOT
from tests.support.tiers import long
from tests.support.training_models import BANKS, FFN, config_of, moe, write_config

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
        [sys.executable, "-m", "moe_jax.commands.cli", "train", "recipe.toml"],
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
    with pytest.raises(InputError, match="gs://bucket/run is .* give gs://bucket/run/model"):
        open_source("gs://bucket/run")
    assert cli.main(["train", "recipe.toml", "--resume", "--set", "train.steps=8"]) == 0  # the model is replaced
    assert [record["step"] for record in records(RUN / "metrics.jsonl")] == list(range(1, 9))
    # The two last ones are kept, and nothing of the one that was not finished.
    folders = {name.split("/")[2] for name in bucket.names() if name.startswith("run/checkpoints/")}
    assert sorted(folder.split("-")[0] for folder in folders) == [".attempt", "6", "8", "steps.json"]


def test_what_cannot_be_written(bucket, place, capsys):
    bucket.fault = lambda request: 403 if request.verb == "put" else None
    assert cli.main(["train", "recipe.toml"]) == 2
    assert "no permission (status 403)" in capsys.readouterr().err
    assert bucket.names() == []


@long
def test_all_that_a_run_needs_and_makes_is_in_the_bucket(bucket, place, capsys):
    """As a user would go about it: nothing of it lies on a disk but what the commands print."""
    from tests.support.dense_models import random_leaves, write_model

    config = config_of(FFN)
    write_model(place / "dense", config, random_leaves(config), (place / "tokenizer.json",))
    assert cli.main(["export", "dense", "gs://bucket/hf", "--max-shard-size", "20KB"]) == 0
    assert cli.main(["convert", "gs://bucket/hf", "gs://bucket/dense"]) == 0
    bucket.store("data/text.txt", (place / "text.txt").read_bytes())
    recipe = RECIPE.replace("text.txt", "gs://bucket/data/text.txt").replace('tokenizer = "tokenizer.json"\n', "")
    recipe = recipe.replace('config = "config.json"\ninit = "random"', 'path = "gs://bucket/dense"')
    recipe = recipe.replace("steps = 6", "steps = 4")
    # Few collectives: where eight devices share two cores, XLA's CPU client may wait for ever for those of one another.
    recipe += '[mesh]\ndata = 8\nfsdp = 1\n[log]\nprofile_steps = [2, 2]\n[eval]\ntext = "gs://bucket/data/text.txt"\n'
    bucket.store("recipe.toml", recipe.encode())
    there = set(place.rglob("*"))
    assert cli.main(["train", "gs://bucket/recipe.toml"]) == 0, capsys.readouterr().err
    names = bucket.names()
    for part in ("run/profile/plugins/profile/", "run/tensorboard/events.out.tfevents", "run/model/config.json"):
        assert any(name.startswith(part) for name in names), names
    trace = next(name for name in names if name.endswith(".xplane.pb"))
    assert b"train" in bucket.content(trace)
    assert cli.main(["report", "gs://bucket/run", "gs://bucket/hf", "--out", "gs://bucket/report.html"]) == 0
    page = bucket.content("report.html").decode()
    assert "Training" in page and "gs://bucket/hf" in page
    assert cli.main(["report", "gs://bucket/run", "--out", "gs://bucket/report.html"]) == 2
    assert "gs://bucket/report.html already exists" in capsys.readouterr().err
    settings = ["--set", "run_dir=gs://bucket/again", "log.profile_steps=[]"]
    assert cli.main(["train", "gs://bucket/recipe.toml", "--restart", "gs://bucket/run@2", *settings]) == 0
    assert records(as_path("gs://bucket/again/metrics.jsonl")) == records(RUN / "metrics.jsonl")
    assert cli.main(["export", "gs://bucket/again/model", "gs://bucket/exported"]) == 0
    assert cli.main(["convert", "gs://bucket/exported", "gs://bucket/converted"]) == 0
    one, other = open_source("gs://bucket/run/model"), open_source("gs://bucket/converted")
    for name in one.specs():
        np.testing.assert_array_equal(one.read(name), other.read(name))
    assert {file.name for file in other.tokenizer_files} == {"tokenizer.json"}
    assert [entry["command"] for entry in other.lineage] == ["test", "export", "convert", "train", "export", "convert"]
    assert set(place.rglob("*")) == there
    assert not [name for name in bucket.names() if "partial" in name]
    # A checkpoint that is not whole is not copied.
    chunk = next(name for name in bucket.names() if name.startswith("run/checkpoints/2-") and "/c/" in name)
    bucket.store(chunk, None)
    with pytest.raises(InputError, match="is not complete: state/.*/c/.* is missing"):
        copy_checkpoint(saved_steps(RUN)[2], place / "copy")


PLACES = [("gs://bucket/run", "gs://bucket/again"), ("gs://bucket/run", "again"), ("run", "gs://bucket/again")]


@long
@pytest.mark.parametrize(("before", "after"), PLACES)
def test_a_restart_from_one_place_to_another(bucket, place, before, after, capsys):
    """Also of a run that was restarted, and whatever listings show."""
    bucket.delay = 1000
    base = ["train", "recipe.toml", "--set", "train.steps=4", "model.param_dtype=bfloat16"]
    assert cli.main([*base, f"run_dir={before}"]) == 0
    assert cli.main([*base, f"run_dir={after}", "--restart", f"{before}@2"]) == 0, capsys.readouterr().err
    assert "continuing after step 2" in capsys.readouterr().out
    one, other = (records(as_path(run) / "metrics.jsonl") for run in (before, after))
    assert one == other and len(one) == 4
    for step in ("@2", "@4", "/model"):  # the checkpoint that was copied, one that was saved, and the result
        first, second = open_source(f"{before}{step}"), open_source(f"{after}{step}")
        for name in first.specs():
            np.testing.assert_array_equal(first.read(name), second.read(name))
    third = "gs://bucket/third" if after.startswith("gs:") else "third"
    assert cli.main([*base, f"run_dir={third}", "--restart", f"{after}@2"]) == 0
    assert records(as_path(third) / "metrics.jsonl") == one
    assert cli.main([*base, f"run_dir={third}", "--restart", f"{after}@2"]) == 2
    assert "new run" in capsys.readouterr().err


@long
@pytest.mark.parametrize("delay", [0, 1000], ids=["lists at once", "lists much later"])
def test_a_restart_is_killed_and_given_again(bucket, place, monkeypatch, no_waiting, delay):  # noqa: F811
    assert cli.main(["train", "recipe.toml", "--set", "train.steps=4"]) == 0
    bucket.delay = delay
    origin = find_origin(as_path("gs://bucket/run@2"), as_path("gs://bucket/again"))

    def job():
        again = as_path("gs://bucket/again")
        write_restart(find_origin(as_path("gs://bucket/run@2"), again), again, origin.recipe, origin.record)

    for number in (25, 60, 100, 140):
        assert killed_at(number, job, monkeypatch)
        assert "again/run.json" not in bucket.names()
    before = set(bucket.names())
    job()
    assert set(bucket.names()) != before and "again/run.json" in bucket.names()
    one, other = open_source("gs://bucket/run@2"), open_source("gs://bucket/again@2")
    for name in one.specs():
        np.testing.assert_array_equal(one.read(name), other.read(name))
    with pytest.raises(InputError, match="gs://bucket/again already exists"):
        job()


def test_lines_that_grow(bucket, monkeypatch):
    monkeypatch.setattr(GrowingObjects, "PART_BYTES", 20)
    path = as_path("gs://bucket/run/metrics.jsonl")
    lines = [f"{{{i:03}}}\n" for i in range(20)]
    writer = path.growing(lines[:3])
    for line in lines[3:]:
        writer.write(line)
    assert len(path.read_grown()) < 120  # the last part is not due
    writer.close()
    assert path.read_grown().decode() == "".join(lines) and (path.parent / "metrics.jsonl.3").is_file()
    removed, remove = [], path.objects.remove

    def remove_one(name, **options):
        if removed:
            raise KeyboardInterrupt
        removed.append(name)
        remove(name, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(path.objects, "remove", remove_one)
        path.growing(lines[:5])
    writer = path.growing(lines[:5])
    for line in lines[5:10]:
        writer.write(line)
    writer.close()
    assert path.read_grown().decode() == "".join(lines[:10])
    path.growing([])
    assert path.read_grown() == b""
