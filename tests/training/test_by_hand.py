"""A loop of public names gives the losses and the weights of `moe-jax train`, to the last bit."""

import contextlib
import dataclasses
import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_jax import peft, training
from moe_jax.commands import cli
from moe_jax.configs import (
    DataSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    PartitionSection,
    Recipe,
    SourceSection,
)
from moe_jax.core.errors import InputError
from moe_jax.core.finite import cast
from moe_jax.model_io.loading import abstract_model
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.dense_models import random_leaves, write_model
from tests.support.environment import ROOT
from tests.support.tiers import long
from tests.support.training_models import config_of, moe

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "train_loop.py"))
RECIPE = """
run_dir = "{name}"
model.path = "model"
data = {{ seq_len = 16, sources = [{{ path = "text.txt" }}] }}
optimizer.learning_rate = 1e-2
schedule.warmup_steps = 2
log.tensorboard = false
train.steps = 3
{more}
"""
MESH = "mesh = {fsdp = 2, expert = 2, data = 2}"
ROUTERS = 'partition.train = [".*/router/.*"]'
BFLOAT16 = 'model.param_dtype = "bfloat16"'
ACCUMULATION = "train.batch_size = 16\ntrain.accumulation = 2"
CASES = {
    "together": "\n".join((MESH, ACCUMULATION, ROUTERS, BFLOAT16)),
    "mesh": MESH,
    "accumulation": ACCUMULATION,
    "routers": ROUTERS,
    "bfloat16": BFLOAT16,
}
CONFIG = config_of(moe(balance_coef=0.1, z_coef=0.01))
IDS = np.random.default_rng(0).integers(0, 64, (4, 9), np.int32)
BATCH = {"tokens": IDS[:, :-1], "targets": IDS[:, 1:]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a small MoE, and a text."""
    folder = tmp_path_factory.mktemp("by-hand")
    write_model(folder / "model", CONFIG, random_leaves(CONFIG), [byte_tokenizer(folder / "tokenizer.json")])
    (folder / "text.txt").write_text("".join(f"the {i}th line says {i * i}\n" for i in range(200)))
    return folder


@long
@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_are_those_of_the_command(name, folder):
    (folder / f"{name}.toml").write_text(RECIPE.format(name=name, more=CASES[name]))
    with contextlib.chdir(folder):
        assert cli.main(["train", f"{name}.toml"]) == 0
        records = EXAMPLE["main"](f"{name}.toml")
        expected = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
        trained, by_hand = (moe_jax.load(Path(name, out)).source for out in ("model", "by-hand"))
    assert [record["step"] for record in records] == [1, 2, 3] and records[0]["aux_loss"] > 0.1
    assert records == [{key: of_command[key] for key in records[0]} for of_command in expected]
    for path, spec in trained.specs().items():
        leaf = cast(path, by_hand.read(path), spec.dtype)  # the command writes the dtypes that it found
        assert leaf.tobytes() == trained.read(path).tobytes(), path


@long
def test_the_example_runs_without_a_recipe(tmp_path, capsys):
    records = EXAMPLE["main"](EXAMPLE["tiny_recipe"](tmp_path))
    assert records[-1]["loss"] < records[0]["loss"] and "of the routers" in capsys.readouterr().out
    assert moe_jax.load(tmp_path / "run" / "by-hand").config.moe_layers == (0, 1)


@pytest.mark.parametrize(
    ("of", "partition"),
    [
        pytest.param(moe_jax.filters.routers, {"train": [".*/router/.*"]}, id="routers"),
        pytest.param(nnx.Param, {}, id="all", marks=long),
    ],
)
def test_a_loop_of_the_loss_and_optax_gives_the_losses_of_train(of, partition, folder):
    """To the last bit, for a batch of all arrays that `train` makes: without segments, attention is another program."""
    model, records, rows = moe_jax.load(folder / "model"), [], np.random.default_rng(0).integers(0, 64, (4, 4, 9))
    recipe = {"optimizer": {"learning_rate": 1e-2, "weight_decay": 0.0}, "schedule": {"kind": "constant"}}
    moe_jax.train(recipe | {"partition": partition}, model, list(rows), on_step=records.append)
    decoder = model.decoder
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b2=0.95, weight_decay=0.0))
    optimizer = nnx.Optimizer(decoder, adam, wrt=of)

    @nnx.jit
    def step(decoder, optimizer, batch):
        wanted = nnx.DiffState(0, of)
        loss, grads = nnx.value_and_grad(lambda decoder: decoder.loss(batch), argnums=wanted)(decoder)
        optimizer.update(decoder, grads)
        return loss

    ones, positions = np.ones((4, 8), np.int32), np.tile(np.arange(8, dtype=np.int32), (4, 1))
    for ids, record in zip(rows, records, strict=True):
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "segment_ids": ones, "positions": positions}
        loss = step(decoder, optimizer, batch | {"weights": ones.astype(np.float32)})
        assert float(loss) == float(np.float32(record["loss"]) + np.float32(record["aux_loss"]))


@pytest.fixture(scope="module")
def parts():
    """Graph, parameters, frozen ones, and a state for plain gradient descent."""
    decoder = moe_jax.tiny_model(experts=4).decoder
    graphdef, params, frozen = peft.split_model(decoder, peft.trainable_paths(decoder, train=["layers/.*/router/.*"]))
    return graphdef, params, frozen, training.init_state(params, optax.sgd(0.1))


def test_what_a_batch_leaves_out_is_all_of_it(parts):
    graphdef, _, frozen, state = parts
    step = training.make_step(graphdef, optax.sgd(0.1))

    @jax.jit  # the rest of the step is not compiled
    def metrics(batch):
        found = step(state, frozen, batch)[1]
        assert found.learning_rate is None
        return found.tokens, found.scored

    assert metrics(BATCH) == (32, 32)


@long
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_layer_that_was_replaced_has_its_own_losses(accumulation):
    decoder = moe_jax.tiny_model(experts=4).decoder
    other = dataclasses.replace(decoder.config.layers[1].mlp, balance_coef=1.0)
    decoder.layers[1].mlp = moe_jax.MoE(other, 16, rngs=nnx.Rngs(1), dtype=jnp.dtype("float32"))
    graphdef, params, frozen = peft.split_model(decoder, peft.trainable_paths(decoder))
    step = training.make_step(graphdef, optax.sgd(0.1), accumulation=accumulation)
    _, metrics = jax.jit(step)(training.init_state(params, optax.sgd(0.1)), frozen, BATCH)
    np.testing.assert_allclose(decoder.loss(BATCH), metrics.loss + metrics.auxiliary, rtol=1e-6)
    assert metrics.auxiliary > 1 and training.to_record(decoder, 1, metrics)["expert_load"].keys() == {"0", "1"}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (IDS, "is no mapping"),
        ({"tokens": IDS}, "no targets"),
        (BATCH | {"targets": IDS}, r"targets has the shape \(4, 9\)"),
        (BATCH | {"weights": IDS[:, 1:]}, "weights is of int32"),
        (BATCH | {"positions": IDS}, "positions has the shape"),
        ({name: ids[0] for name, ids in BATCH.items()}, "tokens has one axis"),
        ({name: ids[:3] for name, ids in BATCH.items()}, "3 rows is not 2 microbatches"),
    ],
)
def test_batches_that_are_none_are_said(parts, batch, message):
    graphdef, _, frozen, state = parts
    with pytest.raises(InputError, match=message):
        training.make_step(graphdef, optax.sgd(0.1), accumulation=2)(state, frozen, batch)


def test_what_does_not_go_together_is_said(parts):
    graphdef, params, frozen, state = parts
    with pytest.raises(InputError, match="accumulation = 0"):
        training.make_step(graphdef, optax.sgd(0.1), accumulation=0)
    step = training.make_step(graphdef, optax.sgd(0.1))
    with pytest.raises(InputError, match="is a State"):
        step(params, frozen, BATCH)
    with pytest.raises(InputError, match="ema_decay of make_step"):
        step(state._replace(ema=params), frozen, BATCH)
    with pytest.raises(InputError, match="after the batch"):
        step(state, frozen, BATCH, frozen)


def recipe_for(folder: Path, **sections) -> Recipe:
    return Recipe(run_dir="run", **({"model": ModelSection(path=str(folder / "model"))} | sections))


def test_recipes_that_a_loop_cannot_be_made_of(folder):
    sources = (SourceSection(path=str(folder / "text.txt")),)
    files = [folder / "model" / "tokenizer.json"]
    with pytest.raises(InputError, match="has no data: "):
        training.open_batches(recipe_for(folder), CONFIG, None, tokenizer_files=files)
    with pytest.raises(InputError, match="no tokenizer.json"):
        training.open_batches(recipe_for(folder, data=DataSection(sources=sources)), CONFIG, None)
    with pytest.raises(InputError, match="data.seq_len = 5120"):
        training.open_batches(
            recipe_for(folder, data=DataSection(sources=sources, seq_len=5120)), CONFIG, None, tokenizer_files=files
        )
    with pytest.raises(InputError, match="model.config has no weights"):
        moe_jax.load(recipe_for(folder, model=ModelSection(config=str(folder / "model" / "config.json"))))
    with pytest.raises(InputError, match="section .model."):
        moe_jax.load(recipe_for(folder), dtype="bfloat16")
    with pytest.raises(InputError, match="does not fit 8 devices"):
        moe_jax.load(recipe_for(folder, mesh=MeshSection(fsdp=3)))


def test_batches_go_on_where_they_are_sought_and_end_with_the_data(folder):
    data = DataSection(sources=(SourceSection(path=str(folder / "text.txt")),), seq_len=16, epochs=1)
    recipe = recipe_for(folder, data=data)
    with contextlib.closing(
        training.open_batches(recipe, CONFIG, None, tokenizer_files=[folder / "model" / "tokenizer.json"])
    ) as batches:
        first = next(batches)
        place, rest = batches.position(), [batch["tokens"] for batch in batches]
        assert first["tokens"].shape == (8, 16) and len(rest) > 3 and next(batches, None) is None
        batches.seek(place, skip=1)
        assert [tokens.tolist() for tokens in rest[1:]] == [batch["tokens"].tolist() for batch in batches]
        # To ask whether there are more changes neither what comes next, nor the position that a checkpoint has.
        batches.seek(place)
        assert not batches.is_at_end() and batches.position() == place
        asked = [(batch["tokens"].tolist(), batches.is_at_end()) for batch in batches]
        assert asked == [(tokens.tolist(), tokens is rest[-1]) for tokens in rest]


def test_moments_and_averages_lie_where_parameters_do():
    mesh = jax.make_mesh((8,), ("fsdp",))
    params = {"a": {"kernel": jnp.ones((256, 128), jnp.bfloat16)}, "b": {"scale": jnp.ones(16)}}
    spec = {"a": {"kernel": P("fsdp")}, "b": {"scale": P()}}
    params = jax.device_put(params, jax.tree.map(lambda one: NamedSharding(mesh, one), spec))
    section = OptimizerSection(kind="adafactor")
    recipe = Recipe(run_dir="run", model=ModelSection(path="model"), optimizer=section)
    state = training.init_state(
        params, training.optimizer_of(recipe, abstract_model(CONFIG), ["a/kernel", "b/scale"]), ema=True
    )
    rows = next(leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (256,))
    assert rows.sharding.spec == P("fsdp") and state.ema["a"]["kernel"].sharding.spec == P("fsdp")
    assert state.ema["a"]["kernel"].dtype == jnp.float32 and state.step.sharding.spec == P()
    assert state.params["a"]["kernel"] is params["a"]["kernel"]


def test_the_model_of_a_recipe_is_as_training_begins_with_it(folder):
    sections = {
        "model": ModelSection(path=str(folder / "model"), param_dtype="bfloat16", compute_dtype="bfloat16"),
        "partition": PartitionSection(freeze=("embed/.*",)),
        "mesh": MeshSection(fsdp=4, expert=2),
    }
    model = moe_jax.load(recipe_for(folder, **sections))
    assert model.mesh is not None and (model.mesh.shape["fsdp"], model.mesh.shape["expert"]) == (4, 2)
    assert model.decoder.embed.embedding.dtype == jnp.float32 and model.decoder.lm_head.kernel.dtype == jnp.bfloat16
    assert model.decoder.compute_dtype == jnp.bfloat16
    assert [file.name for file in model.tokenizer_files] == ["tokenizer.json"]


@long
def test_new_weights_of_a_recipe_are_drawn(folder):
    named = ModelSection(config=str(folder / "model" / "config.json"), init="random")
    drawn = moe_jax.load(recipe_for(folder, model=named, seed=3))
    assert drawn.config == CONFIG and not drawn.lineage and not drawn.tokenizer_files
