"""Layers that predict tokens after the next are trained with the model, and where no recipe asks, not at all."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.core.errors import InputError
from moe_jax.data.sections import DataSection
from moe_jax.model_io.loading import abstract_model
from moe_jax.models import SelectionConfig
from moe_jax.peft import split_model
from moe_jax.training.balance.moe_section import MoESection
from moe_jax.training.in_memory_training import train_on_batches
from moe_jax.training.program import make_program
from moe_jax.training.recipe import MTPSection, OptimizerSection, PartitionSection, TrainSection
from moe_jax.training.step import FurtherTokens, make_loss
from tests.conversion.hf.test_further_layers import with_further
from tests.support.hf_checkpoints import read_tensors, write_checkpoint
from tests.support.tiers import long
from tests.support.training_models import config_of, moe, recipe_of
from tests.training.test_step import drawn, random_batch

CONFIG = dataclasses.replace(config_of(moe(balance_coef=0.0)), further_layers=2)
ROWS = [np.random.default_rng(0).integers(1, 200, (8, 17))] * 6


def trained(recipe, config=CONFIG) -> list[dict]:
    records = []
    train_on_batches(recipe, SimpleNamespace(config=config), ROWS, on_step=records.append)
    return records


@long
def test_further_tokens_are_learnt_and_microbatches_add_up():
    fast = OptimizerSection(learning_rate=1e-2)
    recipe = recipe_of(steps=6, mtp=MTPSection(weight=0.3), optimizer=fast)
    whole = trained(recipe)
    assert whole[-1]["mtp_loss"] < whole[0]["mtp_loss"] - 0.05 and whole[-1]["loss"] < whole[0]["loss"]
    # Of 16 tokens of a row, 15 and 14 have a target; a drawn model finds all tokens alike.
    assert whole[0]["mtp_loss"] == pytest.approx(np.log(264) * 14.5 / 16, rel=1e-2)
    config = dataclasses.replace(config_of(moe(balance_coef=0.5, z_coef=0.5)), further_layers=2)
    halves = recipe_of(steps=2, mtp=MTPSection(), train=TrainSection(steps=2, batch_size=16, accumulation=2))
    one = dataclasses.replace(halves, train=TrainSection(steps=2, batch_size=16))
    rows = [np.random.default_rng(1).integers(1, 200, (16, 17))] * 2
    found = {}
    for name, given in (("halves", halves), ("one", one)):
        records = found[name] = []
        train_on_batches(given, SimpleNamespace(config=config), rows, on_step=records.append)
    for key in ("mtp_loss", "loss", "aux_loss", "grad_norm"):
        pairs = ([record[key] for record in found[name]] for name in ("halves", "one"))
        np.testing.assert_allclose(*pairs, rtol=1e-4)


def test_losses_of_their_routers_are_part_of_the_loss():
    """With no weight, the tokens that they predict teach them nothing, and the losses of their routers still do."""
    config = dataclasses.replace(config_of(moe(balance_coef=0.5, z_coef=0.5)), further_layers=1)
    decoder = nnx.merge(nnx.graphdef(abstract_model(config)), drawn(config))
    graphdef, params, frozen = split_model(decoder, {"further/0/block/mlp/router/kernel"})
    loss = make_loss(graphdef, further=FurtherTokens(weight=0.0, depth=1))
    grads, _ = jax.jit(jax.grad(loss, has_aux=True))(params, frozen, random_batch(0), jnp.float32(1), jax.random.key(0))
    (of_router,) = jax.tree.leaves(grads)
    assert jnp.abs(of_router).max() > 1e-3


@long
def test_a_deepseek_is_trained_with_them_and_exported(tmp_path):
    config, tensors = with_further("deepseek_v3", vocab_size=264)
    write_checkpoint(tmp_path / "hf", config, tensors)
    model = moe_jax.convert(tmp_path / "hf", tmp_path / "model", further="keep")
    rows, recipe = [row % 60 for row in ROWS[:2]], {"train": {"steps": 2}, "moe": {"bias_update_rate": 0.001}}
    moe_jax.export(moe_jax.train({**recipe, "mtp": {"weight": 0.3}}, model, rows), tmp_path / "with")
    moe_jax.export(moe_jax.train(recipe, model, rows), tmp_path / "without")
    place = "model.layers.3."
    changed = {
        folder: {name for name, one in read_tensors(tmp_path / folder).items() if (one != tensors[name]).any()}
        for folder in ("with", "without")
    }
    copies = {f"{place}embed_tokens.weight", f"{place}shared_head.head.weight"}
    further = {name for name in tensors if name.startswith(place)} - copies
    assert changed["with"] >= further  # the bias of selection, too
    assert not changed["without"] & further and copies <= changed["with"] and copies <= changed["without"]
    out = read_tensors(tmp_path / "with")
    np.testing.assert_array_equal(out[f"{place}embed_tokens.weight"], out["model.embed_tokens.weight"])
    np.testing.assert_array_equal(out[f"{place}shared_head.head.weight"], out["lm_head.weight"])


def test_what_is_trained_is_what_the_recipe_says():
    def paths(**sections) -> set[str]:
        program = make_program(recipe_of(data=DataSection(seq_len=16), **sections), CONFIG, jax.devices()[:1])
        return {path.split("/")[1] for path in program.trainable if path.startswith("further/")}

    assert paths() == set()
    assert paths(mtp=MTPSection()) == {"0", "1"} and paths(mtp=MTPSection(depth=1)) == {"0"}
    assert paths(mtp=MTPSection(), partition=PartitionSection(train=("further/1/.*",))) == {"1"}


def test_models_without_such_layers_are_refused():
    plain = config_of(moe(selection=SelectionConfig(bias=True)))
    with pytest.raises(InputError, match="mtp.depth = all"):
        make_program(recipe_of(mtp=MTPSection()), plain, jax.devices()[:1])
    with pytest.raises(InputError, match="mtp.depth = 3"):
        make_program(recipe_of(mtp=MTPSection(depth=3)), CONFIG, jax.devices()[:1])
    with pytest.raises(InputError, match="weight"):
        MTPSection(weight=0.0)


BIASED = dataclasses.replace(config_of(moe(selection=SelectionConfig(bias=True), balance_coef=0.0)), further_layers=2)
OWN_BIAS = "stack/segments/0/blocks/0/mlp/router/selection_bias"


@pytest.mark.parametrize(("mtp", "layers"), [(None, ()), (MTPSection(depth=1), (0,)), (MTPSection(), (0, 1))])
def test_biases_of_layers_that_are_run_are_moved(mtp, layers):
    recipe = recipe_of(moe=MoESection(bias_update_rate=0.1), mtp=mtp)
    program = make_program(recipe, BIASED, jax.devices()[:1])
    moved = {path for path in program.trainable if "selection_bias" in path}
    assert moved == {OWN_BIAS, *(f"further/{layer}/block/mlp/router/selection_bias" for layer in layers)}


@long
@pytest.mark.parametrize("accumulation", [1, 2])
def test_biases_move_against_the_loads_that_are_reported(accumulation):
    train, rate = TrainSection(steps=1, batch_size=16, accumulation=accumulation), 0.25
    recipe = recipe_of(steps=1, mtp=MTPSection(), moe=MoESection(bias_update_rate=rate), train=train)
    records = []
    rows = [np.concatenate([ROWS[0], 263 - ROWS[0]])]
    decoder, _ = train_on_batches(recipe, SimpleNamespace(config=BIASED), rows, on_step=records.append)
    (loads,) = (record["mtp_expert_load"] for record in records)
    assert loads.keys() == records[0]["mtp_dropped"].keys() == {"0", "1"} and loads["0"] != loads["1"]
    for layer, load in loads.items():
        bias = decoder.further[int(layer)].block.mlp.router.selection_bias[...]
        np.testing.assert_allclose(sum(load), 1.0, atol=1e-5)
        np.testing.assert_array_equal(bias, rate * np.sign(1 / len(load) - np.asarray(load)))


@long
def test_what_is_computed_again_changes_nothing():
    found = {}
    for remat in ("none", "dots", "full"):
        recipe = recipe_of(steps=1, mtp=MTPSection())
        recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, remat=remat))
        found[remat] = trained(recipe)[0]
    for remat in ("dots", "full"):
        for key in ("mtp_loss", "loss", "grad_norm"):
            np.testing.assert_allclose(found[remat][key], found["none"][key], rtol=1e-5)
