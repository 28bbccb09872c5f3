"""Runs with every optimizer: the loss falls, an interruption changes no bit, a restart says what begins anew."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.checkpoints.orbax_store import TrainingCheckpoints
from moe_jax.commands import cli
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.training.program import Program, first_state, make_program
from moe_jax.training.recipe import (
    GroupSection,
    MeshSection,
    OptimizerSection,
    Recipe,
    ScheduleSection,
    TrainSection,
)
from tests.support.tiers import long, one_in
from tests.support.training_models import BANKS, config_of, moe, recipe_of
from tests.training.run.test_restart import losses
from tests.training.test_step import PLAIN, initial_states, largest_difference, leaves, random_batch, run

ROUTER = GroupSection(match=(".*/router/.*",), learning_rate=1e-3)
SECTIONS = {
    "adafactor": OptimizerSection(kind="adafactor", learning_rate=1e-2),
    "lion": OptimizerSection(kind="lion", learning_rate=3e-3, moments="bfloat16"),
    "muon": OptimizerSection(kind="muon", learning_rate=1e-2, groups=(ROUTER,)),
}
CONFIG = config_of(moe(BANKS["low-rank"], expert=PLAIN))


def recipe_with(section: OptimizerSection, **sections) -> Recipe:
    return recipe_of(optimizer=section, schedule=ScheduleSection(kind="constant"), batch_size=4, **sections)


def trained(program: Program, state, frozen, steps: int) -> tuple[list[float], object]:
    found = []
    for _ in range(steps):
        state, metrics = program.step(state, frozen, random_batch(0, rows=4))
        found.append(float(metrics.loss))
    return found, state


@one_in(3)
@pytest.mark.parametrize("name", SECTIONS)
def test_the_loss_falls_and_an_interruption_changes_no_bit(name, tmp_path):
    train = TrainSection(batch_size=4, accumulation=2 if name == "lion" else 1)
    program = make_program(recipe_with(SECTIONS[name], train=train), CONFIG, jax.devices()[:1])
    with jax.set_mesh(program.mesh):
        params, frozen = initial_states(program)
        first, state = trained(program, first_state(program, params), frozen, 4)
        checkpoints = TrainingCheckpoints(tmp_path / "checkpoints", keep=1)
        checkpoints.save(4, state, {})
        checkpoints.wait()
        rest, whole = trained(program, state, frozen, 4)
        restored, _ = checkpoints.restore(4, program.state)
        again, continued = trained(program, restored, frozen, 4)
        checkpoints.close()
    assert rest[-1] < first[0] - 0.5 and rest[-1] < first[-1]
    assert again == rest
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(continued), strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_state_lies_where_its_parameter_does():
    mesh = MeshSection(fsdp=2, expert=2, tensor=2)
    program = make_program(recipe_of(optimizer=SECTIONS["muon"], mesh=mesh), CONFIG)
    where = {name.replace("/", "."): leaf for name, leaf in leaves(program.state.params)}
    moments = [(name.replace("/", "."), leaf) for name, leaf in leaves(program.state.opt_state) if leaf.size > 12]
    assert len(moments) > len(where)
    for name, leaf in moments:
        (owner,) = [one for one in where if one in name]
        assert leaf.sharding == where[owner].sharding and leaf.shape == where[owner].shape, name


@pytest.fixture(scope="module")
def adafactor_of_eight():
    """A program with matrices that are large enough to be factored."""
    section = OptimizerSection(kind="adafactor")
    mesh = MeshSection(fsdp=2, expert=2, tensor=2)
    return make_program(recipe_of(optimizer=section, mesh=mesh), config_of(moe(BANKS["full"]), d_model=256))


def test_factors_lie_like_the_rest_of_their_parameter(adafactor_of_eight):
    found = {
        name: tuple(leaf.sharding.spec) for name, leaf in leaves(adafactor_of_eight.state.opt_state) if leaf.size > 64
    }
    # The embedding [V, d] is split over (tensor, fsdp), the head [d, V] over (fsdp, tensor).
    assert found["embed.embedding/0/v_row"] == found["lm_head.kernel/0/v_row"] == ("fsdp",)
    assert found["embed.embedding/0/v_col"] == found["lm_head.kernel/0/v_col"] == ("tensor",)


@long
@pytest.mark.parametrize("name", SECTIONS)
def test_every_mesh_computes_the_same(name):
    recipe = recipe_of(optimizer=SECTIONS[name])
    one = run(recipe, CONFIG)
    eight = run(recipe_of(optimizer=SECTIONS[name], mesh=MeshSection(fsdp=2, expert=2, tensor=2)), CONFIG, devices=8)
    np.testing.assert_allclose(eight[0], one[0], atol=1e-4)
    assert largest_difference(eight[2].params, one[2].params) < 1e-4


def rates(name: str) -> list[float]:
    return [json.loads(line)["learning_rate"] for line in Path(name, "metrics.jsonl").read_text().splitlines()]


@long
def test_a_restart_with_another_optimizer_begins_its_moments_anew(folder, capsys):
    """The parameters, the data and the learning rate go on; and so does the restarted run after an interruption."""
    restart = ["train", "recipe.toml", "--set", "run_dir=other", "checkpoint.every=1", "optimizer.kind=lion"]
    assert cli.main([*restart, "--restart", "run@2"]) == 0
    said = "the moments of the optimizer begin anew, at zero"
    assert said in capsys.readouterr().out
    assert rates("other") == rates("run") and losses("other")[:3] == losses("run")[:3]
    assert losses("other")[3] != losses("run")[3]
    changed = json.loads(Path("other/model/lineage.json").read_text())[-1]["options"]["restarts"][0]["changed"]
    assert changed == {"optimizer.kind": ["adamw", "lion"]}
    whole, model = losses("other"), ModelDirectory(Path("other/model")).fingerprint()
    # As if it had been killed before its first checkpoint of its own, and after it: only there are moments read.
    for kept in (2, 3):
        for step in range(kept + 1, 5):
            shutil.rmtree(folder / f"other/checkpoints/{step}", ignore_errors=True)
        shutil.rmtree(folder / "other/model")
        assert cli.main([*restart, "--resume"]) == 0
        assert (said in capsys.readouterr().out) == (kept == 2)
        assert losses("other") == whole and ModelDirectory(Path("other/model")).fingerprint() == model
    # And without --restart another optimizer is another run.
    assert cli.main(["train", "recipe.toml", "--resume", "--set", "optimizer.kind=muon"]) == 2
    assert "optimizer.kind (was 'adamw', is 'muon')" in capsys.readouterr().err


def leaves_at(run: str) -> dict[str, np.ndarray]:
    source = open_source(Path(run))
    return {path: source.read(path) for path in source.specs()}


@long
def test_the_average_is_saved_evaluated_and_exported(folder, capsys):
    start = ["train", "recipe.toml", "--set", "checkpoint.every=1", 'eval={text="text/a.txt", every=4, seq_len=16}']
    plain = [*start, "run_dir=plain", "ema={decay=0.2, export=false, evaluate=false}"]
    average = [*start, "run_dir=average", "ema={decay=0.2}"]
    assert cli.main(plain) == 0 and cli.main(average) == 0
    assert losses("average") == losses("plain") == losses("run")  # the average changes no step
    frozen = "embed/embedding"
    expected = leaves_at("model")
    for step in range(1, 5):
        now, kept = leaves_at(f"plain@{step}"), min(0.2, (1 + step) / (10 + step))
        expected = {path: kept * leaf + (1 - kept) * now[path] for path, leaf in expected.items()}
        found = leaves_at(f"average@{step}")
        assert found.keys() == expected.keys()
        for path, leaf in expected.items():
            np.testing.assert_allclose(found[path], leaf, rtol=1e-5, atol=1e-6, err_msg=path)
            assert (found[path] == now[path]).all() == (path == frozen), path
    assert open_source(Path("average@4")).fingerprint() == ModelDirectory(Path("average/model")).fingerprint()
    assert ModelDirectory(Path("plain/model")).fingerprint() == ModelDirectory(Path("run/model")).fingerprint()
    scored = [json.loads(Path(run, "metrics.jsonl").read_text().splitlines()[-1]) for run in ("plain", "average")]
    assert scored[0]["eval_loss"] != scored[1]["eval_loss"]
    model = ModelDirectory(Path("average/model")).fingerprint()
    shutil.rmtree("average/model")
    for step in (3, 4):
        shutil.rmtree(f"average/checkpoints/{step}", ignore_errors=True)
    assert cli.main([*average, "--resume"]) == 0
    assert ModelDirectory(Path("average/model")).fingerprint() == model
    # A run without an average is restarted with one, and the other way round.
    capsys.readouterr()
    assert cli.main([*start, "run_dir=later", "ema={decay=0.2}", "--restart", "run@2"]) == 0
    assert "the average begins with the parameters of the checkpoint" in capsys.readouterr().out
    assert losses("later") == losses("run")
    expected = leaves_at("run@2")
    for step in (3, 4):
        now = leaves_at(f"plain@{step}")
        expected = {path: 0.2 * leaf + 0.8 * now[path] for path, leaf in expected.items()}
    for path, leaf in leaves_at("later@4").items():
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-5, atol=1e-6, err_msg=path)
    assert cli.main([*start, "run_dir=without", "--restart", "average@2"]) == 0
    assert ModelDirectory(Path("without/model")).fingerprint() == ModelDirectory(Path("run/model")).fingerprint()


@long
def test_groups_are_keys_like_others(folder, capsys):
    """They are written down, compared, and may be changed by a restart, which keeps the moments."""
    groups = 'optimizer.groups=[{match=["layers/0/attention/.*"], learning_rate=1e-5}]'
    assert cli.main(["train", "recipe.toml", "--set", "run_dir=grouped", groups, "--restart", "run@2"]) == 0
    assert "moments" not in capsys.readouterr().out
    entry = json.loads(Path("grouped/model/lineage.json").read_text())[-1]["options"]
    assert entry["optimizer.groups"][0]["match"] == ["layers/0/attention/.*"]
    assert entry["restarts"][0]["changed"]["optimizer.groups"][0] == []
    assert cli.main(["train", "recipe.toml", "--set", "run_dir=grouped", groups, "--resume"]) == 0
    assert cli.main(["train", "recipe.toml", "--set", "run_dir=grouped", "--resume"]) == 2
    assert "optimizer.groups (was [{" in capsys.readouterr().err
    bad = groups.replace("layers/0", "layers/7")
    assert cli.main(["train", "recipe.toml", "--set", "run_dir=bad", bad]) == 2
    assert "'layers/7/attention/.*' matches no trained" in capsys.readouterr().err
