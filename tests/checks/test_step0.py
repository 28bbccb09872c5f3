import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.checks.step0 import PROBE_SHAPE, compare_logits, probe_tokens
from moe_jax.checks.streamed_model import StreamedModel
from moe_jax.experts.forms.sparse import to_csr
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig, LayerConfig, ModelConfig, MoEConfig, RopeConfig
from tests.support.dense_models import ATTENTION, dense_config, random_leaves, write_model
from tests.support.numerics import logits_of
from tests.support.tiers import one_in
from tests.support.training_models import encoder_decoder


def moe_layer(bank: BankConfig, **kwargs) -> LayerConfig:
    expert = dense_config(**kwargs).layers[0].mlp
    return LayerConfig(attention=ATTENTION, mlp=MoEConfig(expert=expert, num_experts=4, top_k=2, bank=bank))


WINDOW = dataclasses.replace(ATTENTION, sliding_window=5, biases=("q", "k", "v"), qk_norm="head")
NARROW = dataclasses.replace(ATTENTION, head_dim=ATTENTION.head_dim // 2)
WIDE = dataclasses.replace(ATTENTION, head_dim=ATTENTION.head_dim * 2)
MODELS = {
    "moe": dense_config(),
    "layer-norm": dense_config(norm="layer", gated=False, bias=True, head_bias=True),
    "tied": dense_config(tie_embeddings=True, rope=RopeConfig(scaling="linear", factor=2.0)),
}
LAYERS = {
    "moe": (moe_layer(BankConfig()), moe_layer(BankConfig(kind="low-rank", rank=2))),
    "layer-norm": (
        moe_layer(BankConfig(kind="sparse", rate=0.5), gated=False, bias=True),
        *(dataclasses.replace(dense_config(gated=False, bias=True).layers[0], attention=a) for a in (NARROW, WIDE)),
    ),
    "tied": (dataclasses.replace(dense_config().layers[0], attention=WINDOW),),
}


@one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_streamed_model_gives_the_decoders_logits(name, tmp_path):
    config = dataclasses.replace(MODELS[name], layers=MODELS[name].layers[:1] + LAYERS[name])
    leaves = random_leaves(config)
    for path, spec in leaves.items():
        if path.endswith(("columns", "row_ends")):
            at, part = path.rsplit("/", 1)
            positions = np.arange(leaves[f"{at}/values"].shape[1])
            places = to_csr(positions, leaves[at.replace("/delta/", "/base/") + "/kernel"].shape)
            leaves[path] = np.broadcast_to(places[part == "row_ends"], spec.shape)
    source = ModelDirectory(write_model(tmp_path / "model", config, leaves))
    tokens = probe_tokens(config, 0)
    streamed = StreamedModel(config, source.specs(), tokens)
    layers_done = []
    logits = streamed.logits(source.read, lambda: layers_done.append(1))
    assert logits.shape == (*PROBE_SHAPE, config.vocab_size) and len(layers_done) == config.num_layers
    expected = logits_of(load_model(source), jnp.asarray(tokens))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_streamed_decoder_reads_what_its_encoder_was_given(tmp_path):
    ffn = dense_config().layers[0].mlp
    config = encoder_decoder(ffn, ffn)
    source = ModelDirectory(write_model(tmp_path / "model", config, random_leaves(config)))
    tokens = np.array([[5, 9, 3, 7], [2, 4, 8, 6]], np.int32)
    shifted = np.array([[0, 5, 9, 3], [0, 2, 4, 8]], np.int32)
    expected = logits_of(load_model(source), jnp.asarray(shifted), inputs=jnp.asarray(tokens))
    logits = StreamedModel(config, source.specs(), tokens).logits(source.read)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_memory_is_that_of_the_largest_layer():
    def memory(config: ModelConfig) -> int:
        leaves = random_leaves(config)
        return StreamedModel(config, leaves, probe_tokens(config, 0)).memory

    narrow, deep = dense_config(num_layers=1, dim=2048), dense_config(num_layers=3, dim=2048)
    wide = dense_config(num_layers=1, dim=4096)
    assert memory(deep) == memory(narrow)
    kernels = 3 * 16 * 2048 * 4
    assert kernels <= memory(narrow) <= 8 * kernels
    assert memory(wide) - memory(narrow) >= kernels


def test_probes_stay_inside_the_vocabulary_and_the_context():
    config = dense_config()
    assert probe_tokens(config, 0).shape == PROBE_SHAPE
    assert probe_tokens(dataclasses.replace(config, max_positions=7), 0).shape == (PROBE_SHAPE[0], 7)
    tokens = probe_tokens(dataclasses.replace(config, vocab_size=3), 0)
    assert set(tokens.ravel().tolist()) == {0, 1, 2}
    assert not np.array_equal(probe_tokens(config, 0), probe_tokens(config, 1))


@pytest.mark.parametrize(
    ("largest", "difference", "num_layers", "equal"),
    [
        (0.5, 0.9e-5, 2, True),
        (0.5, 1.1e-5, 2, False),
        (20.0, 1.9e-4, 2, True),
        (20.0, 2.1e-4, 2, False),
        (1.0, 2.9e-5, 30, True),
        (1.0, 3.1e-5, 30, False),
        (1.0, np.nan, 2, False),
        (1.0, np.inf, 2, False),
    ],
)
def test_logits_are_equal_up_to_rounding(largest, difference, num_layers, equal):
    dense = np.full((1, 2, 3), -largest)
    upcycled = dense.copy()
    upcycled[0, 1, 2] += difference
    step0 = compare_logits(dense, upcycled, num_layers)
    assert step0.equal == equal
    assert step0.largest == largest
    assert step0.difference == pytest.approx(difference, rel=1e-6) or not np.isfinite(difference)
