"""What a run may be continued with: other paths, but the same contents; more steps, but the same schedule."""

import dataclasses
import json
import math
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.data.sections import SourceSection
from moe_jax.model_io.adapter_dir import ModelReference
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.training import run_directory
from moe_jax.training import training_run as run_module
from moe_jax.training.recipe import DistillSection, load_recipe
from moe_jax.training.run_directory import RunLock, RunRecord, check_same, read_record, write_record
from tests.support.dense_models import random_leaves, write_model
from tests.support.tiers import long
from tests.support.training_models import FFN, config_of, recipe_of


def rates(run: str = "run") -> list[float]:
    return [json.loads(line)["learning_rate"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_tokenizer_of_the_recipe_goes_with_the_model(finished):
    model = finished / "run" / "model"
    words = finished / "words"
    assert {file.name for file in ModelDirectory(model).tokenizer_files} == {
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (model / "tokenizer.json").read_bytes() == (words / "bytes.json").read_bytes()
    assert (model / "tokenizer_config.json").read_bytes() == (words / "tokenizer_config.json").read_bytes()
    assert (model / "generation_config.json").read_text() == '{"top_k": 3}'


def test_a_continuation_keeps_the_schedule(folder, capsys):
    """Four steps decay to a tenth; two more keep what the rate was at the end, and do not stretch the decay."""
    before = rates()
    assert before[-1] == pytest.approx(1e-3)
    began = time.monotonic()
    assert cli.main(["train", "recipe.toml", "--resume", "--set", "train.steps=6"]) == 0
    took = time.monotonic() - began
    assert "the learning rate does not change after step 4 (schedule.steps)" in capsys.readouterr().out
    assert rates() == pytest.approx([*before, 1e-3, 1e-3])
    assert json.loads((folder / "run/model/lineage.json").read_text())[-1]["options"]["schedule.steps"] == 4
    steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()[-2:]]
    assert sum(step["seconds"] for step in steps) < took
    assert all(step["tokens_per_second"] * step["seconds"] == pytest.approx(step["tokens"]) for step in steps)
    one, other = (step["flops_per_second"] / step["tokens_per_second"] for step in steps)
    assert one == pytest.approx(other)


def test_a_record_keeps_numbers_of_a_config_that_are_not_finite(tmp_path):
    config = {"foreign": {"limits": [math.inf, -math.inf]}}
    record = RunRecord(source=None, config=config, tokenizer="0" * 64, data=("1" * 64,))
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record


def test_a_finished_run_is_left_as_it_is_and_fewer_steps_than_were_done_are_refused(folder, failing, capsys):
    before = content(folder / "run")
    line = failing("--resume", "--set", "train.steps=3")
    assert "train.steps = 3 is fewer than the 4 steps that run has done" in line
    assert cli.main(["train", "recipe.toml", "--resume"]) == 0
    assert "the run is complete: run/model is of step 4" in capsys.readouterr().out
    assert content(folder / "run") == before
    # A model that is not there is written again, with what was measured.
    lineage = Path("run/model/lineage.json")
    (measured,) = (entry["measured"] for entry in json.loads(lineage.read_text())[-1:])
    shutil.rmtree("run/model")
    assert cli.main(["train", "recipe.toml", "--resume"]) == 0
    assert json.loads(lineage.read_text())[-1]["measured"] == measured and "loss" in measured
    after = content(folder / "run")
    # Dates, and paths, for the folder is a copy.
    assert {name for name in before if before[name] != after[name]} <= {"model/lineage.json", "run.json"}


@long
def test_a_run_that_is_to_be_continued_names_its_horizon(folder, failing):
    line = failing("--resume", "--set", "train.steps=6", "schedule.steps=6")
    assert "cannot continue run with a changed recipe: schedule.steps (was 4, is 6); undo the change, or begin " in line
    first = ["train", "recipe.toml", "--set", "run_dir=long", "schedule.steps=6"]
    assert cli.main(first) == 0 and cli.main([*first, "train.steps=6", "--resume"]) == 0
    assert cli.main(["train", "recipe.toml", "--set", "run_dir=whole", "train.steps=6"]) == 0
    assert rates("long") == rates("whole") and len(rates("long")) == 6


@long
def test_model_data_and_run_can_be_moved(folder, capsys):
    whole = ["train", "recipe.toml", "--set", "run_dir=whole", "train.steps=6", "schedule.steps=4"]
    assert cli.main(whole) == 0
    for old, new in (("model", "other/model"), ("text", "other/texts"), ("words", "other/words"), ("run", "other/run")):
        Path("other").mkdir(exist_ok=True)
        shutil.move(old, new)
    moved = ["model.path=other/model", "data.tokenizer=other/words/bytes.json", "run_dir=other/run"]
    moved += ['data.sources=[{path="other/texts/*.txt"}]', "train.steps=6"]
    assert cli.main(["train", "recipe.toml", "--resume", "--set", *moved]) == 0
    assert "continuing after step 4" in capsys.readouterr().out
    one, other = ModelDirectory(Path("other/run/model")), ModelDirectory(Path("whole/model"))
    assert one.fingerprint() == other.fingerprint()
    # The run knows now where its model is.
    reference = json.loads(Path("other/run/run.json").read_text())["source"]
    assert (reference["path"], reference["absolute"]) == ("../model", str(folder / "other" / "model"))
    assert open_source(Path("other/run@6")).fingerprint() == one.fingerprint()


def change_model(folder):
    config = config_of(FFN)
    shutil.rmtree(folder / "model")
    leaves = {path: leaf + 1 for path, leaf in random_leaves(config).items()}
    write_model(folder / "model", config, leaves)


def change_text(folder):
    file = folder / "text" / "b.txt"
    file.write_text(file.read_text().replace("says 7", "says 8"))


def change_tokenizer(folder):
    (folder / "words" / "tokenizer_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_model, "model is not the model that it was begun with"),
        (change_text, "text/*.txt holds other data than at its beginning"),
        (change_tokenizer, "words/bytes.json is not the tokenizer that it had"),
        (lambda folder: (folder / "run/run.json").unlink(), "has checkpoints, but no run.json that says of what"),
    ],
)
def test_what_changed_at_its_old_place_is_refused(folder, failing, change, message):
    change(folder)
    before = content(folder / "run")
    assert message in failing("--resume", "--set", "train.steps=6")
    assert content(folder / "run") == before


def test_a_run_has_one_process_at_a_time(folder, failing):
    before = content(folder / "run")
    with RunLock(Path("run")) as lock:
        lock.take()
        held = rf"run is in use by process {os.getpid()} on \S+ since \S+ \S+; wait for it, or choose another run_dir"
        for arguments in (["--resume", "--set", "train.steps=6"], [], ["--restart", "run@2"]):
            assert re.fullmatch(held, failing(*arguments))
        # Between the lock and the name there is a moment.
        name = Path("run/.lock").read_text()
        Path("run/.lock").write_text("")
        later = threading.Timer(0.05, lambda: Path("run/.lock").write_text(name))
        later.start()
        assert re.fullmatch(held, failing())
        later.join()
    assert content(folder / "run") == before


@long
def test_a_run_that_diverged_before_its_first_checkpoint_begins_anew(folder, failing, capsys):
    spoilt = ("optimizer.learning_rate=1e30", "optimizer.clip_norm=0", "checkpoint.every=4")
    line = failing("--set", "run_dir=new", *spoilt)
    step = len(rates("new")) + 1
    assert f"step {step}: loss is " in line and line.endswith(
        f"no checkpoint had been saved yet; begin anew with a lower optimizer.learning_rate, or with checkpoint.every "
        f"below {step}, so that --restart can --skip-batches"
    )
    Path("new/wandb_id").write_text("0123abcd")
    # Without --resume and with, whatever is changed.
    assert cli.main(["train", "recipe.toml", "--set", "run_dir=new", "train.steps=1"]) == 0
    assert "the run in new had saved no checkpoint and begins anew" in capsys.readouterr().out
    assert len(rates("new")) == 1 and not Path("new/wandb_id").exists() and open_source(Path("new/model")).fingerprint()
    shutil.rmtree("new/checkpoints")
    assert failing("--set", "run_dir=new") == "new already exists; continue it with --resume, or choose another run_dir"
    shutil.rmtree("new/model")
    assert cli.main(["train", "recipe.toml", "--resume", "--set", "run_dir=new", "train.steps=1", "seed=3"]) == 0


def test_of_two_that_begin_a_run_one_wins(folder, failing, monkeypatch):
    """The second looks while there is nothing, and finds the run of the first when it wants to write."""
    writing, ended = threading.Event(), threading.Event()
    usual = run_module.make_record

    def slowly(*arguments):
        if threading.current_thread() is not threading.main_thread():
            writing.set()
            ended.wait(60)
        return usual(*arguments)

    monkeypatch.setattr(run_module, "make_record", slowly)
    second = []
    arguments = ["--set", "run_dir=new", "train.steps=1"]
    thread = threading.Thread(target=lambda: second.append(cli.main(["train", "recipe.toml", *arguments])))
    thread.start()
    assert writing.wait(60)
    assert cli.main(["train", "recipe.toml", *arguments]) == 0
    before = content(folder / "new")
    ended.set()
    thread.join()
    assert second == [2] and content(folder / "new") == before


def test_a_lock_that_a_killed_process_left_does_not_count(folder):
    (folder / "run" / ".lock").write_text("process 1 on elsewhere since yesterday")
    (folder / "empty").mkdir()
    (folder / "empty" / ".lock").write_text("process 1 on elsewhere since yesterday")
    assert cli.main(["train", "recipe.toml", "--resume", "--set", "train.steps=5"]) == 0
    assert cli.main(["train", "recipe.toml", "--set", "run_dir=empty", "train.steps=1"]) == 0
    assert not (folder / "run" / ".lock").exists() and not (folder / "empty" / ".lock").exists()


def test_a_beginning_that_was_interrupted_is_begun_again(folder, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_directory, "write_record", interrupted)
        run_module.train(*begin("new"))
    assert cli.main(["train", "recipe.toml", "--resume", "--set", "run_dir=new", "train.steps=1"]) == 0
    assert open_source(Path("new/model")).fingerprint()


def begin(run_dir: str):
    source = open_source(Path("model"))
    return load_recipe("recipe.toml", [f"run_dir={run_dir}", "train.steps=1"]), source.config, source


def test_a_run_goes_on_with_the_same_inputs_and_names_those_that_are_others():
    recipe = dataclasses.replace(recipe_of(), distill=DistillSection(teacher="large"))
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, sources=(SourceSection(path="a.txt"),)))
    model, teacher = (ModelReference(path=name, fingerprint=name) for name in ("small", "large"))
    before = RunRecord(source=model, config={"d_model": 16}, tokenizer="one", data=("text",), teacher=teacher)
    moved = dataclasses.replace(teacher, path="elsewhere")
    check_same(before, dataclasses.replace(before, teacher=moved), recipe)
    for changes, named in (
        ({"source": moved}, ["not the model"]),
        ({"config": {"d_model": 32}}, ["describes another model"]),
        ({"teacher": model}, ["large is not the teacher"]),
        ({"tokenizer": "two"}, ["not the tokenizer"]),
        ({"data": ("other",), "teacher": None}, ["large is not the teacher", "a.txt holds other data"]),
    ):
        with pytest.raises(InputError) as told:
            check_same(before, dataclasses.replace(before, **changes), recipe)
        assert all(words in str(told.value) for words in named) and str(told.value).count(" is not ") <= 1
    check_same(before, dataclasses.replace(before, teacher=None), dataclasses.replace(recipe, distill=None))
