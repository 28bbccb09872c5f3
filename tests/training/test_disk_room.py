"""The room that a run needs on its disk, known before it begins."""

import dataclasses
import errno
from collections import namedtuple
from pathlib import Path

import jax
import pytest

from moe_jax.core.errors import InputError
from moe_jax.training import disk_room
from moe_jax.training.disk_room import checkpoint_bytes, checkpoints_to_save, kept_after, model_bytes, require_room
from moe_jax.training.program import make_program
from moe_jax.training.recipe import CheckpointSection
from tests.support.training_models import FFN, config_of, recipe_of

usage = namedtuple("usage", ("total", "used", "free"))
RECIPE = recipe_of(steps=20, checkpoint=CheckpointSection(every=10, keep=2))


@pytest.fixture(scope="module")
def program():
    return make_program(RECIPE, config_of(FFN), jax.devices()[:1])


@pytest.mark.parametrize(("done", "saves"), [(0, 3), (5, 3), (10, 2), (15, 2), (20, 1), (24, 1), (25, 0)])
def test_a_run_saves_regularly_and_at_its_end(done, saves):
    recipe = recipe_of(steps=25, checkpoint=CheckpointSection(every=10))
    assert checkpoints_to_save(done, recipe) == saves


def test_a_checkpoint_has_parameters_and_moments_and_a_model_parameters_in_their_dtype(program):
    count = sum(leaf.size for leaf in jax.tree.leaves(program.state.params))
    assert 12 * count <= checkpoint_bytes(program) < 12 * count + 100
    assert model_bytes(RECIPE, program, None) == 4 * count
    half = dataclasses.replace(RECIPE, model=dataclasses.replace(RECIPE.model, output_dtype="bfloat16"))
    assert model_bytes(half, program, None) == 2 * count


# 20 steps, a checkpoint every 10: of those that are there, of the other run's step that is copied, and how many of
# checkpoints and models there must be room for.
@pytest.mark.parametrize(
    ("there", "copied", "checkpoints", "models"),
    [((), None, 2, 1), ((10,), None, 1, 1), ((20,), None, 0, 1), ((), 10, 2, 1), ((1, 2), None, 0, 1)],
)
def test_room_for_what_is_kept_and_for_the_model(program, tmp_path, monkeypatch, there, copied, checkpoints, models):
    recipe = dataclasses.replace(RECIPE, run_dir=str(tmp_path / "run"))
    monkeypatch.setattr(disk_room, "saved_steps", lambda run_dir: dict.fromkeys(there))
    needed = checkpoints * checkpoint_bytes(program) + models * model_bytes(recipe, program, None)
    if there == (1, 2):  # a third one is written before the first one goes
        needed = checkpoint_bytes(program)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(0, 0, needed))
    require_room(recipe, program, None, copied=copied)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(0, 0, needed - 1))
    with pytest.raises(InputError, match="checkpoint.keep = 2"):
        require_room(recipe, program, None, copied=copied)
    remote = dataclasses.replace(RECIPE, run_dir="gs://bucket/run")
    require_room(remote, program, None, copied=copied)


def test_what_a_full_disk_leaves_is_what_is_said_to_be_kept(tmp_path: Path, monkeypatch):
    recipe, full = dataclasses.replace(RECIPE, run_dir=str(tmp_path)), OSError(errno.ENOSPC, "No space left on device")
    assert "no checkpoint" in kept_after(full, recipe, "again") and full.filename == str(tmp_path)
    monkeypatch.setattr(disk_room, "saved_steps", lambda run_dir: dict.fromkeys((10, 20)))
    named = OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
    assert kept_after(named, recipe, "again") == "the checkpoint of step 20 is kept; continue with: again"
    assert named.filename == "metrics.jsonl"
