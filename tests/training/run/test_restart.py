"""Restarting a run from one of its checkpoints: a new run, with other settings or without some batches."""

import json
import shutil
from pathlib import Path

import pytest

import moe_jax
from moe_jax.commands import cli
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.training import training_run
from tests.support.tiers import long
from tests.training.run.test_continuation import content

TRAIN = ["train", "recipe.toml", "--set", "checkpoint.every=1"]


def losses(run: str) -> list[tuple]:
    records = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def position(run: str, step: int) -> dict:
    """Where the data were when a checkpoint was written."""
    file = Path(run, "checkpoints", str(step), "_CHECKPOINT_METADATA")
    return json.loads(file.read_bytes())["custom_metadata"]["data"]


def restarts(run: str) -> list[dict]:
    return json.loads(Path(run, "model/lineage.json").read_text())[-1]["options"]["restarts"]


def test_without_changes_it_gives_the_same_curve_to_the_last_bit(folder, capsys, monkeypatch):
    # Other processes hear in JSON what the first one decides.
    monkeypatch.setattr(training_run, "first_decides", lambda action: json.loads(json.dumps(action())))
    before = content(folder / "run")
    # What stands in its place is a run that had saved nothing: nothing is lost.
    shutil.copytree("run", "again", ignore=shutil.ignore_patterns("checkpoints", "model"))
    Path("again/wandb_id").write_text("0123abcd")
    assert cli.main([*TRAIN, "run_dir=again", "--restart", "run@2"]) == 0
    assert "again had saved no checkpoint" in capsys.readouterr().out and not Path("again/wandb_id").exists()
    assert content(folder / "run") == before
    assert losses("again") == losses("run") and len(losses("again")) == 4
    assert ModelDirectory(Path("again/model")).fingerprint() == ModelDirectory(Path("run/model")).fingerprint()
    assert json.loads(Path("again/run.json").read_text())["source"]["absolute"] == str(folder / "model")
    assert restarts("again") == [{"run": str(folder / "run"), "step": 2, "skipped_batches": 0, "changed": {}}]


def test_a_restart_of_a_restart_from_the_same_step_goes_on_as_that_did(folder, capsys):
    """The checkpoint is the first run's, which had no average."""
    how = [*TRAIN, "ema.decay=0.9", "train.steps=3", "schedule.steps=4"]
    assert cli.main([*how, "run_dir=one", "--restart", "run@2", "--skip-batches", "1"]) == 0
    assert cli.main([*how, "run_dir=two", "--restart", "one@2"]) == 0
    assert losses("two") == losses("one") and losses("one")[2] != losses("run")[2]
    assert moe_jax.load("one@2").source.fingerprint() == moe_jax.load("run@2").source.fingerprint()
    # It is given again as it was, and not with the first run, which had another batch next.
    assert cli.main([*how, "run_dir=two", "--resume", "--restart", "one@2"]) == 0
    capsys.readouterr()
    assert cli.main([*how, "run_dir=two", "--resume", "--restart", "run@2"]) == 2
    assert "was begun with" in capsys.readouterr().err


@long
def test_a_run_that_diverged_goes_on_with_another_learning_rate(folder, capsys):
    spoilt = [*TRAIN, "run_dir=spoilt", "optimizer.learning_rate=1e30", "optimizer.clip_norm=0"]
    assert cli.main([*spoilt, "--restart", "run@2"]) == 2
    line = "the last good checkpoint is spoilt/checkpoints/3; go on from it, or from an earlier one, with --restart "
    assert line + "spoilt@3, another run_dir, and a lower" in capsys.readouterr().err
    assert losses("spoilt")[:2] == losses("run")[:2] and not Path("spoilt/model").exists()
    # Step 3 was finite, but with such a rate it spoilt the parameters.
    settings = ["optimizer.learning_rate=1e-3", "schedule.kind=constant", "train.steps=5"]
    assert cli.main([*TRAIN, "run_dir=better", *settings, "--restart", "spoilt@2"]) == 0
    assert losses("better")[:3] == losses("run")[:3] and len(losses("better")) == 5
    first, second = restarts("better")
    assert first["changed"] == {"optimizer.learning_rate": [1e-2, 1e30], "optimizer.clip_norm": [1.0, 0.0]}
    assert second["changed"] == {
        "optimizer.learning_rate": [1e30, 1e-3],
        "optimizer.clip_norm": [0.0, 1.0],
        "schedule.kind": ["cosine", "constant"],
    }
    assert [restart["run"] for restart in (first, second)] == [str(folder / "run"), str(folder / "spoilt")]


@long
def test_with_resume_it_may_be_given_again(folder, capsys):
    """As a script does that is started over after every interruption."""
    again = [*TRAIN, "run_dir=again", "--resume", "--restart", "run@2", "--skip-batches", "1"]
    assert cli.main(again) == 0
    whole = losses("again")
    shutil.rmtree(folder / "again/checkpoints/4")
    assert cli.main(again) == 0 and losses("again") == whole
    assert cli.main([*again[:-1], "2"]) == 2
    # Without its checkpoint it would be another run.
    shutil.rmtree(folder / "again/checkpoints")
    capsys.readouterr()
    assert cli.main(again) == 2
    assert f"again has no checkpoint left; restart {folder}/run@2 with another run_dir" in capsys.readouterr().err


@long
def test_skipped_batches_stay_skipped(folder, capsys):
    restart = [*TRAIN, "run_dir=skipping", "train.steps=5", "schedule.steps=4"]
    assert cli.main([*restart, "--restart", "run@2", "--skip-batches", "1"]) == 0
    assert "skipping 1 batches" in capsys.readouterr().out
    assert position("skipping", 3) == position("run", 4) != position("run", 2)
    assert losses("skipping")[:2] == losses("run")[:2] and losses("skipping")[2] != losses("run")[2]
    whole, model = losses("skipping"), ModelDirectory(Path("skipping/model")).fingerprint()
    assert restarts("skipping")[0]["skipped_batches"] == 1
    # As if it had been killed before its first checkpoint of its own, and before its second.
    for kept in (2, 3):
        for step in range(kept + 1, 6):
            shutil.rmtree(folder / f"skipping/checkpoints/{step}", ignore_errors=True)
        shutil.rmtree(folder / "skipping/model")
        assert cli.main([*restart, "--resume"]) == 0
        assert losses("skipping") == whole
        assert ModelDirectory(Path("skipping/model")).fingerprint() == model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--restart", "run@2"], "run; choose another run_dir"),
        (["run_dir=new", "--restart", "run@3"], "3; it has 2, 4"),
        (["run_dir=new", "--restart", "run"], "cannot restart from run: expected RUN@STEP, as in run@500"),
        (["run_dir=new", "--restart", "text@1"], "text: there is no run.json"),
        (["--restart", "run@2", "--resume"], "run@2; leave out --restart"),
        (["run_dir=new", "--skip-batches", "3"], "--skip-batches 3: expected"),
        (["run_dir=new", "--restart", "run@2", "--skip-batches", "-1"], "--skip-batches -1: expected"),
        (
            ["run_dir=new", "seed=4", "--restart", "run@2"],
            "cannot restart with a changed recipe: seed (was 0, is 4); a restart may change optimizer",
        ),
        (
            ["run_dir=new", 'data.sources=[{path="text/a.txt"}]', "--restart", "run@2"],
            "text/a.txt holds other data",
        ),
    ],
)
def test_what_is_no_restart_is_one_clear_line_and_leaves_nothing(folder, capsys, arguments, message):
    before = content(folder)
    # `run_dir` and the like belong to --set, which stands before.
    assert cli.main([*TRAIN, *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("moe-jax: error") == 1
    assert content(folder) == before
