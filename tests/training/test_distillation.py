"""Distillation in training: its loss and gradient, on every mesh; which leaves move; runs that stop and go on."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import local_rows, path_name, place
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.nn import auxiliary_loss
from moe_jax.planning import planned_training
from moe_jax.planning.compile_only import bytes_of, compiled_step
from moe_jax.training.program import abstract_batch, first_state, make_program
from moe_jax.training.recipe import (
    DistillSection,
    EmaSection,
    MeshSection,
    ModelSection,
    PartitionSection,
    Recipe,
    ScheduleSection,
    TrainSection,
)
from tests.support.dense_models import random_leaves, write_model
from tests.support.tiers import EVERY, long
from tests.support.training_models import BANKS, FFN, config_of, moe, recipe_of
from tests.training.test_step import PLAIN, drawn, initial_states, largest_difference, random_batch

ROUTERS_AND_NORMS = (".*/router/.*", ".*norm/.*")
STUDENT = config_of(moe(BANKS["low-rank" if EVERY else "full"], expert=PLAIN))
# Another width, a tied head, and no experts or those of another form. The scale makes it sure of something, so that
# the divergence is no small difference of large numbers.
TEACHER = config_of(moe(expert=PLAIN) if EVERY else PLAIN, d_model=24, tie_embeddings=True, logit_scale=20.0)
DISTILL = DistillSection(teacher="teacher", weight=0.7, temperature=2.0)


def distilling(section: DistillSection = DISTILL, **sections) -> Recipe:
    sections = {"schedule": ScheduleSection(kind="constant")} | sections
    return recipe_of(distill=section, partition=PartitionSection(train=ROUTERS_AND_NORMS), **sections)


def run(recipe, *, config=STUDENT, teacher=TEACHER, devices=1, steps=2):
    """Metrics of a few steps, the program, and the state after them."""
    program = make_program(recipe, config, jax.devices()[:devices], teacher=teacher)
    assert program.teacher is not None
    rows, found = recipe.train.batch_size, []
    with jax.set_mesh(program.mesh):
        params, frozen = initial_states(program)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, program.taught)
        taught = jax.device_put(jax.tree.map(np.copy, drawn(teacher)), shardings)
        state = first_state(program, params)
        for step in range(steps):
            batch = place(random_batch(step, rows), local_rows(program.mesh, rows), program.mesh, rows)
            state, metrics = program.step(state, frozen, batch, taught)
            found.append([float(getattr(metrics, key)) for key in ("loss", "distillation", "auxiliary", "grad_norm")])
        assert largest_difference(taught, drawn(teacher)) == 0.0
    return np.array(found), program, state


@pytest.fixture(scope="module")
def one_device():
    return run(distilling())


def test_loss_and_gradient_of_routers_are_those_of_a_plain_reference():
    """Logits of all tokens at once, and the formula of the gradient in float64."""
    program = make_program(distilling(), STUDENT, jax.devices()[:1], teacher=TEACHER)
    params, frozen = initial_states(program)
    batch = random_batch(0)
    arguments = {"tokens": batch["tokens"], "positions": batch["positions"], "segment_ids": batch["segment_ids"]}
    assert program.teacher is not None
    taught = jax.jit(lambda state: nnx.merge(program.teacher.graphdef, state)(**arguments).logits)
    right = np.float64(taught(drawn(TEACHER)))

    def forward(params):
        out = nnx.merge(program.graphdef, params, frozen)(**arguments)
        return out.logits, auxiliary_loss(STUDENT, out.router)

    (logits, auxiliary), pull = jax.jit(lambda params: jax.vjp(forward, params))(params)
    logits = np.float64(logits)

    def log_shares(logits):
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    t, weight, each = DISTILL.temperature, DISTILL.weight, np.float64(batch["weights"]) / batch["weights"].sum()
    log_p, log_q, log_plain = (log_shares(one) for one in (logits / t, right / t, logits))
    divergence = t**2 * (np.exp(log_q) * (log_q - log_p)).sum(-1)
    targets = np.eye(264)[batch["targets"]]
    slope = weight * t * (np.exp(log_p) - np.exp(log_q)) + (1 - weight) * (np.exp(log_plain) - targets)
    cotangents = jnp.asarray(slope * each[..., None], jnp.float32), jnp.ones(())
    (expected,) = jax.jit(lambda pull, cotangents: pull(cotangents))(pull, cotangents)
    norm = float(np.sqrt(sum(np.square(np.float64(leaf)).sum() for leaf in jax.tree.leaves(expected))))

    found, program, state = run(distilling(), steps=1)
    np.testing.assert_allclose(found[0][0], -(each * (log_plain * targets).sum(-1)).sum(), rtol=1e-5)
    np.testing.assert_allclose(found[0][1], (each * divergence).sum(), rtol=1e-5)
    np.testing.assert_allclose(found[0][2], auxiliary, rtol=1e-5)
    np.testing.assert_allclose(found[0][3], norm, rtol=1e-4)
    # AdamW's first moment after a step is a tenth of the gradient, clipped.
    moments = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)}
    routers = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(expected)
               if path_name(path).endswith("router/kernel")]  # fmt: skip
    assert len(routers) == 1
    for name, gradient in routers:
        (moment,) = [leaf for path, leaf in moments.items() if path.endswith(f"mu/{name}")]
        clipped = gradient * min(1.0, 1.0 / norm)
        np.testing.assert_allclose(moment / (1 - 0.9), clipped, rtol=1e-4, atol=1e-4 * np.abs(clipped).max())


@long
def test_a_mesh_of_eight_devices_trains_like_one(one_device):
    found, _, state = run(distilling(mesh=MeshSection(fsdp=2, expert=2, tensor=2)), devices=8)
    np.testing.assert_allclose(found, one_device[0], rtol=1e-4, atol=1e-5)
    assert largest_difference(state.params, one_device[2].params) < 1e-4


@long
def test_accumulation_an_average_and_bfloat16_go_with_a_teacher():
    whole, _, state = run(distilling(ema=EmaSection()))
    accumulated = TrainSection(batch_size=8, accumulation=4)
    parts, _, other = run(distilling(ema=EmaSection(), train=accumulated))
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6)
    assert largest_difference(other.ema, state.ema) < 1e-6
    rough_model = ModelSection(config="c", init="random", compute_dtype="bfloat16")
    rough, *_ = run(distilling(model=rough_model), steps=1)
    np.testing.assert_allclose(rough[:, :2], whole[:1, :2], rtol=0.02)
    assert np.abs(rough[:, 1] - whole[:1, 1]).max() > 0


@long  # the formula, of which this is a case, is compared above
def test_a_model_that_is_its_own_teacher_has_nothing_to_learn():
    config = config_of(moe(balance_coef=0.0))
    found, *_ = run(distilling(DistillSection(teacher="itself")), config=config, teacher=config, steps=1)
    loss, divergence, auxiliary, norm = found[0]
    assert loss > 1 and abs(divergence) < 1e-6 and auxiliary == 0 and norm < 1e-5


@long
def test_a_teacher_is_counted():
    recipe, student, teacher = distilling(mesh=MeshSection(fsdp=1)), config_of(moe(expert=PLAIN)), config_of(PLAIN)
    program = make_program(recipe, student, jax.devices()[:1], teacher=teacher)
    alone = dataclasses.replace(recipe, distill=None)
    without = make_program(alone, student, jax.devices()[:1])
    assert without.teacher is None and without.arguments == ()
    size = sum(4 * leaf.size for leaf in jax.tree.leaves(program.arguments))
    more, fewer = bytes_of(compiled_step(program, recipe)), bytes_of(compiled_step(without, alone))
    assert more["arguments"] - fewer["arguments"] == pytest.approx(size, rel=0.01)
    on_mesh = dataclasses.replace(recipe, mesh=MeshSection(fsdp=2))
    planned = planned_training.planned_training(on_mesh, student, "v5p", compiles=False, teacher=teacher)
    counted = {item.name: item.bytes for item in planned.items}
    assert size / 2 <= counted["parameters, teacher"] < 0.6 * size  # norms are not divided
    assert any("without what the teacher's forward pass holds" in item.note for item in planned.items)


def test_what_a_teacher_says_is_no_constant_of_the_program():
    program = make_program(distilling(), STUDENT, jax.devices()[:1], teacher=TEACHER)
    with jax.set_mesh(program.mesh):
        batch = abstract_batch(distilling(), STUDENT, program.mesh)
        traced = jax.make_jaxpr(program.step)(program.state, program.frozen, batch, *program.arguments)
    assert max((np.size(one) for one in traced.consts), default=0) < 16 * 264


RECIPE = """
run_dir = "run"
[model]
path = "student"
[distill]
teacher = "teacher"
[data]
seq_len = 16
tokenizer = "tokenizer.json"
sources = [{ path = "text.txt" }]
[partition]
train = [".*/router/.*", ".*norm/.*"]
[optimizer]
learning_rate = 1e-2
[schedule]
kind = "constant"
[train]
steps = 4
batch_size = 8
[checkpoint]
every = 2
[log]
tensorboard = false
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tokenizer_path) -> Path:
    """A folder with a student, teachers, data, and a finished run."""
    folder = tmp_path_factory.mktemp("distillation")
    (folder / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    files = (folder / "tokenizer.json",)
    config = config_of(moe(expert=PLAIN))
    leaves = random_leaves(config)
    random = np.random.default_rng(1)
    worse = {path: leaf + 0.1 * leaf.std() * random.standard_normal(leaf.shape) for path, leaf in leaves.items()}
    write_model(folder / "teacher", config, leaves, files)
    write_model(folder / "student", config, {k: v.astype(leaves[k].dtype) for k, v in worse.items()}, files)
    other = config_of(FFN, vocab_size=300)
    write_model(folder / "other-words", other, random_leaves(other), files)
    lines = [f"the {i}th line says {i * i} and {i % 7}\n" for i in range(300)]
    (folder / "text.txt").write_text("".join(lines))
    (folder / "recipe.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", "recipe.toml"]) == 0
    return folder


def records(run_dir: str) -> list[dict]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


@long
def test_only_routers_and_norms_move_and_the_student_comes_nearer(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    found = records("run")
    assert found[-1]["distill_loss"] < found[0]["distill_loss"] and found[0]["loss"] > 1
    before, after = ModelDirectory(Path("student")), ModelDirectory(Path("run/model"))
    moved = {path for path in before.specs() if (before.read(path) != after.read(path)).any()}
    assert moved == {path for path in before.specs() if "/router/" in path or "norm/" in path}
    assert before.specs() == after.specs()
    options = after.lineage[-1]["options"]
    assert (options["distill.teacher"], options["distill.weight"]) == ("teacher", 1.0)


@long
def test_a_run_that_goes_on_gives_the_same_bits_with_a_teacher_that_was_moved(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    parts = ["train", "recipe.toml", "--set", "run_dir=parts", "schedule.steps=4"]
    assert cli.main([*parts, "train.steps=2"]) == 0
    Path("elsewhere").symlink_to("teacher")
    assert cli.main([*parts, "distill.teacher=elsewhere", "--resume"]) == 0
    assert "continuing after step 2" in capsys.readouterr().out
    keys = ("step", "loss", "distill_loss", "grad_norm")
    assert [[one[key] for key in keys] for one in records("parts")] == [
        [one[key] for key in keys] for one in records("run")
    ]
    one, other = ModelDirectory(Path("parts/model")), ModelDirectory(Path("run/model"))
    assert all((one.read(path) == other.read(path)).all() for path in one.specs())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("distill.weight=0",), "weight = 0.0 must lie in (0, 1]"),
        (("distill.weight=1.5",), "weight = 1.5 must lie in (0, 1]"),
        (("distill.temperature=0",), "temperature = 0.0 must lie in [0.001, 1000]"),
        (("distill.teacher=nowhere",), "no model at nowhere"),
        (
            ("distill.teacher=other-words",),
            "distill.teacher has a vocabulary of 300 tokens, the model one of 264; a teacher needs the same vocabulary",
        ),
        (("run_dir=teacher/run",), "teacher"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(workplace, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(workplace)
    before = sorted(workplace.rglob("*"))
    assert cli.main(["train", "recipe.toml", "--set", "run_dir=bad", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("moe-jax: error:") == 1
    assert sorted(workplace.rglob("*")) == before


def test_a_run_goes_on_with_its_own_teacher_only(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    for changed, message in [
        ("distill.teacher=student", "student is not the teacher that it was begun with"),
        ("distill.temperature=2.0", "cannot continue run with a changed recipe: distill.temperature (was 1.0, is 2.0)"),
    ]:
        assert cli.main(["train", "recipe.toml", "--resume", "--set", "train.steps=6", changed]) == 2
        assert message in capsys.readouterr().err


def test_encoders_neither_teach_nor_learn():
    from tests.support.training_models import encoder_decoder

    pairs = encoder_decoder(FFN, FFN)
    for model, teacher, which in ((STUDENT, pairs, "distill.teacher has one"), (pairs, TEACHER, "the model has one")):
        with pytest.raises(InputError, match=f"distill .* {which}"):
            make_program(distilling(), model, jax.devices()[:1], teacher=teacher)
