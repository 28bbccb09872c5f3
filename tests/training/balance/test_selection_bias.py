"""Biases of selection that move towards balance: by hand, on any mesh, through interruptions, and out again."""

import dataclasses
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.functional.routing.router_stats import RouterStats
from moe_jax.model_io.loading import abstract_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import FFNConfig, SelectionConfig
from moe_jax.nn.moe import Router
from moe_jax.peft import split_model
from moe_jax.training.balance.moe_section import MoESection
from moe_jax.training.balance.selection_bias import biases_after_step, missing_load, moved_biases, without_biases
from moe_jax.training.program import first_state, make_program
from moe_jax.training.recipe import EmaSection, OptimizerSection, TrainSection
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.hf_checkpoints import CONFIGS, random_tensors, read_tensors, write_checkpoint
from tests.support.tiers import long
from tests.support.training_models import config_of, moe, recipe_of, write_config
from tests.training.run.test_runs import RECIPE, train_until
from tests.training.test_step import initial_states, largest_difference, random_batch, run

RATE = 0.25
BIASED = moe(gate="topk_sigmoid", balance_coef=0.0, selection=SelectionConfig(bias=True))
CONFIG = config_of(BIASED, BIASED)
# A decay and a rate that nothing learnt would survive, and a norm that nothing is above.
WILD = OptimizerSection(learning_rate=1e-2, weight_decay=10.0, decay_router=True, clip_norm=1e-3)
SECTIONS = dict(moe=MoESection(bias_update_rate=RATE), optimizer=WILD)


def bias_of(params: nnx.State) -> nnx.Variable:
    """The biases of both layers, [2, E]."""
    return params["stack"]["segments"][0]["blocks"][0]["mlp"]["router"]["selection_bias"]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([4, 2, 2, 0], [-1, 0, 0, 1]),
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        # A third is no binary fraction: the mean of seven experts is met exactly, all the same.
        ([3, 3, 3, 3, 3, 3, 3], [0] * 7),
        ([3, 2, 3, 3, 3, 3, 4], [0, 1, 0, 0, 0, 0, -1]),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_what_is_missing_to_the_mean(counts, expected, microbatches):
    counts = np.array(counts, np.float32)
    tokens = np.float32(max(1, counts.sum()))  # one expert per token
    share = counts / tokens
    if microbatches > 1:  # as sums over microbatches are divided again, with their rounding
        share = np.sum(np.stack([share * (tokens / 3)] * 3), axis=0) * (np.float32(1) / tokens)
    empty = jnp.zeros(1)
    stats = RouterStats(empty, jnp.asarray(share)[None], *[empty] * 4, jnp.asarray(tokens)[None], empty, empty)
    found = missing_load(Router([0], False, (0.0,) * 4, 1, 1), stats)
    assert found.tolist() == [expected]


def test_each_layer_has_the_bias_that_its_own_router_moves():
    """Of two patterns of layers: a dense one, a stack of two, and one that is the only one of its kind."""
    other = dataclasses.replace(BIASED, num_experts=3, top_k=1)
    decoder = abstract_model(config_of(FFNConfig(dim=8), BIASED, BIASED, other))
    paths = moved_biases(decoder, RATE)
    _, biases = without_biases(split_model(decoder, paths)[1])
    loads = ([[0.5, 0.5, 0.0, 0.0], [0.0, 0.25, 0.25, 0.5]], [[0.0, 0.0, 1.0]])
    router = [RouterStats(*[jnp.asarray(load)] * 6, jnp.full(len(load), 8.0), *[jnp.zeros(1)] * 2) for load in loads]
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), biases)
    moved = jax.tree.leaves(biases_after_step(zeros, decoder, tuple(router), 0.5))
    assert [bias.tolist() for bias in moved] == [[[-0.5, -0.5, 0.5, 0.5], [0.5, 0.0, 0.0, -0.5]], [[0.5, 0.5, -0.5]]]


@long
def test_biases_move_by_the_loads_of_the_whole_batch_and_by_nothing_else():
    """Padding does not count, microbatches count together, and the optimizer, wild as it is, knows nothing of them."""
    recipe = recipe_of(train=TrainSection(batch_size=8, accumulation=2), ema=EmaSection(), **SECTIONS)
    program = make_program(recipe, CONFIG, jax.devices()[:1])
    with jax.set_mesh(program.mesh):
        params, frozen = initial_states(program)
        bias_of(params).set_value(jnp.asarray(np.random.default_rng(3).normal(0, 0.05, (2, 4)), jnp.float32))
        state = first_state(program, params)
        before = [np.array(leaf) for leaf in (bias_of(state.params)[...], state.params["embed"]["embedding"][...])]
        assert not [path for path, _ in nnx.to_flat_state(frozen) if path[-1] == "selection_bias"]
        assert "selection_bias" not in str(jax.tree_util.tree_structure(state.opt_state))
        batch = random_batch(0)
        decoder = nnx.merge(program.graphdef, state.params, frozen)
        out = decoder(batch["tokens"], segment_ids=batch["segment_ids"], positions=batch["positions"], routing=True)
        state, metrics = program.step(state, frozen, batch)
    counted = batch["segment_ids"] > 0
    for layer, routing in out.routing.items():
        counts = np.bincount(np.asarray(routing.experts)[counted].ravel(), minlength=4)
        assert counts.sum() == 2 * counted.sum() and len(set(counts)) > 1
        expected = before[0][layer] + np.float32(RATE) * np.sign(counts.mean() - counts).astype(np.float32)
        np.testing.assert_array_equal(bias_of(state.params)[layer], expected)
    assert largest_difference(before[1], state.params["embed"]["embedding"][...]) > 1e-3
    assert metrics.grad_norm > 0 and bias_of(state.params)[...].dtype == jnp.float32
    # The average is of what is learnt, and has the biases that there are now.
    np.testing.assert_array_equal(bias_of(state.ema)[...], bias_of(state.params)[...])
    assert largest_difference(state.ema["embed"], state.params["embed"]) > 1e-3


@long
@pytest.mark.parametrize("accumulation", [1, 2])
def test_eight_devices_move_them_as_one_does(accumulation):
    recipe = recipe_of(train=TrainSection(batch_size=16, accumulation=accumulation), **SECTIONS)
    one, eight = (run(recipe, CONFIG, devices=devices) for devices in (1, 8))
    np.testing.assert_allclose(one[0], eight[0], rtol=1e-4)
    moved = [np.asarray(bias_of(state.params)[...]) for _, _, state, _ in (one, eight)]
    np.testing.assert_array_equal(*moved)
    assert np.abs(moved[0]).max() >= RATE


@long
def test_a_skewed_task_is_balanced():
    """What all tokens have in common decides, and speaks for the same experts, until the biases speak against them."""
    largest = {}
    for rate in (0.0, 0.002):
        program, loads = make_program(recipe_of(moe=MoESection(bias_update_rate=rate)), CONFIG, jax.devices()[:1]), []
        with jax.set_mesh(program.mesh):
            params, frozen = initial_states(program)
            bias_of(params if rate else frozen).set_value(jnp.zeros((2, 4)))
            embedding = params["embed"]["embedding"]
            embedding.set_value(embedding[...] + 0.05)
            state = first_state(program, params)
            for step in range(60):
                state, metrics = program.step(state, frozen, random_batch(step))
                loads.append(np.max(metrics.router[0].load, axis=-1))
        largest[rate] = np.mean(loads[-20:])
    assert largest[0.002] < 0.32 < 0.4 < largest[0.0], largest


def write_folder(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    write_config(folder / "config.json", CONFIG)
    (folder / "text.txt").write_text("".join(f"the {i}th line says {i * i}\n" for i in range(400)))
    (folder / "held_out.txt").write_text("a line of another text\n" * 5)
    recipe = RECIPE.format(tokenizer=byte_tokenizer(folder / "tokenizer.json"), steps=20)
    recipe = recipe.replace("layers/0/", "layers/.*/")  # the two are stacked
    (folder / "recipe.toml").write_text(f"{recipe}[moe]\nbias_update_rate = {RATE}\n[ema]\n")


@long
def test_a_run_that_was_killed_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    write_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "recipe.toml"]) == 0
    code, said = train_until(tmp_path, "killed", 13, signal.SIGKILL, "--set", "run_dir=killed")
    assert code == -signal.SIGKILL, said
    assert cli.main(["train", "recipe.toml", "--resume", "--set", "run_dir=killed"]) == 0
    whole, again = (ModelDirectory(Path(run, "model")) for run in ("run", "killed"))
    assert whole.fingerprint() == again.fingerprint()
    for layer in (0, 1):
        bias = whole.read(f"layers/{layer}/mlp/router/selection_bias")
        assert bias.dtype == np.float32 and np.abs(bias).max() > 0
        assert (
            bias.tobytes() == moe_jax.load("run@20").source.read(f"layers/{layer}/mlp/router/selection_bias").tobytes()
        )


@long
def test_moved_biases_are_exported(tmp_path, monkeypatch):
    """Of a DeepSeek-V3 in bfloat16, whose biases become float32 before they move."""
    config = CONFIGS["deepseek_v3"] | {"vocab_size": 264, "torch_dtype": "bfloat16"}
    write_checkpoint(tmp_path / "hf", config, random_tensors(config, "bfloat16"))
    rows = [np.random.default_rng(0).integers(0, 264, (8, 17))] * 3
    recipe = {"train": {"steps": 3}, "moe": {"bias_update_rate": 2.0**-10}}
    trained = moe_jax.train(recipe, moe_jax.load(tmp_path / "hf"), rows)
    moe_jax.export(trained, tmp_path / "out")
    name = "model.layers.{}.mlp.gate.e_score_correction_bias"
    before, after = (read_tensors(tmp_path / folder) for folder in ("hf", "out"))
    for layer in (1, 2):
        moved = after[name.format(layer)] - before[name.format(layer)].astype(np.float32)
        assert after[name.format(layer)].dtype == np.float32
        assert set(moved * 2**10) <= set(range(-3, 4)) and np.abs(moved).max() == 3 / 2**10


def test_routers_without_such_a_bias_are_refused():
    sections = {"moe": MoESection(bias_update_rate=1e-3)}
    with pytest.raises(InputError, match="layers 1 have"):
        make_program(recipe_of(**sections), config_of(BIASED, moe()), jax.devices()[:1])
    with pytest.raises(InputError, match="has no MoE"):
        make_program(recipe_of(**sections), config_of(FFNConfig(dim=32)), jax.devices()[:1])
    with pytest.raises(InputError, match="bias_update_rate"):
        MoESection(bias_update_rate=-1.0)
