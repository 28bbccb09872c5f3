"""The first Qwen, which Transformers lacks, against its definition in NumPy: logits, generation, loss and gradient."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.conversion import HuggingFaceDirectory, read_hf_config, write_hf_config
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import load_model, model_leaves
from tests.families import plain_qwen
from tests.support.generated import generate
from tests.support.hf_checkpoints import CONFIGS, expected_tensors, write_checkpoint
from tests.support.losses import next_token_loss
from tests.support.numerics import logits_of
from tests.support.tiers import EVERY

LENGTH, NEW_TOKENS = 40, 64
SMALL = {**CONFIGS["qwen"], "seq_length": 80}
SHAPES = {
    # Rows are as long as the model was trained for: the last position is the one where a mistake would begin to show.
    "whole length": {**SMALL, "seq_length": LENGTH},
    "biases everywhere, tied": {**SMALL, "no_bias": False, "tie_word_embeddings": True, "rotary_emb_base": 50.0},
    "half rotated, one head": {**SMALL, "rotary_pct": 0.5, "num_attention_heads": 1, "kv_channels": 32},
    "wide": {**SMALL, "hidden_size": 48, "num_attention_heads": 2, "kv_channels": 24, "layer_norm_epsilon": 1e-2},
}
TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, LENGTH))


def random_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """All weights, biases and norms are random and large enough to matter."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * 0.15 + (".ln_" in name)).astype(np.float32)
        for name, shape in expected_tensors(config).items()
    }


def in_float64(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: tensor.astype(np.float64) for name, tensor in tensors.items()}


SOME = SHAPES if EVERY else dict(list(SHAPES.items())[:2])


@pytest.mark.parametrize("config", SOME.values(), ids=SOME)
def test_logits_equal_the_definition(config, tmp_path, strict_numerics):
    tensors = random_tensors(config)
    model = load_model(HuggingFaceDirectory(write_checkpoint(tmp_path / "qwen", config, tensors)))
    expected = np.stack([plain_qwen.logits(config, in_float64(tensors), row) for row in TOKENS])
    assert np.std(expected) > 0.1  # otherwise equality would say little
    found = np.asarray(logits_of(model, jnp.asarray(TOKENS, jnp.int32)))
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


def test_greedy_continuations_equal_the_definition(tmp_path):
    tensors = random_tensors(SMALL)
    model = load_model(HuggingFaceDirectory(write_checkpoint(tmp_path / "qwen", SMALL, tensors)))
    prompts = TOKENS[:, :6]
    expected = [plain_qwen.continuation(SMALL, in_float64(tensors), prompt, NEW_TOKENS) for prompt in prompts]
    assert generate(model, prompts.tolist(), max_new_tokens=NEW_TOKENS) == expected
    with pytest.raises(InputError, match="rows of 81 positions, but beyond 80 a 'qwen' model .* else"):
        generate(model, prompts.tolist(), max_new_tokens=75)


def test_loss_and_gradient_equal_the_definition(tmp_path, strict_numerics):
    """The gradient in a random direction of every tensor, against differences of losses in float64."""
    config = SHAPES["biases everywhere, tied"]
    tensors, directions = random_tensors(config), random_tensors(config, seed=1)
    graphdef, params = nnx.split(load_model(HuggingFaceDirectory(write_checkpoint(tmp_path / "a", config, tensors))))
    tokens = jnp.asarray(TOKENS, jnp.int32)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(params):
        scores = nnx.merge(graphdef, params)(tokens).logits[:, :-1]
        loss, count = next_token_loss(scores, tokens[:, 1:], jnp.ones(tokens[:, 1:].shape, jnp.float32))
        return loss / count

    loss, gradient = loss_and_gradient(params)
    exact = in_float64(tensors)
    np.testing.assert_allclose(loss, plain_qwen.loss(config, exact, TOKENS), rtol=1e-4)

    source = HuggingFaceDirectory(write_checkpoint(tmp_path / "b", config, directions))
    slopes = dict.fromkeys(tensors, 0.0)
    for path, leaf in model_leaves(nnx.merge(graphdef, gradient)):
        slopes[source.weights.pieces[path][0].tensor] += np.vdot(np.float64(leaf), np.float64(source.read(path)))
    step = 1e-5
    for name, slope in slopes.items():
        ahead, behind = (
            plain_qwen.loss(config, {**exact, name: exact[name] + sign * step * directions[name]}, TOKENS)
            for sign in (1, -1)
        )
        np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-6, err_msg=name)


def test_longer_rows_are_refused_unless_nothing_changes_there(tmp_path):
    config = {**SMALL, "seq_length": 32}
    tensors, tokens = random_tensors(config), jnp.asarray(TOKENS, jnp.int32)
    model = load_model(HuggingFaceDirectory(write_checkpoint(tmp_path / "a", config, tensors)))
    with pytest.raises(InputError, match="rows of 40 positions, but beyond 32"):
        model(tokens)
    config |= {"use_logn_attn": False, "use_dynamic_ntk": False}
    model = load_model(HuggingFaceDirectory(write_checkpoint(tmp_path / "b", config, tensors)))
    expected = np.stack([plain_qwen.logits(config, in_float64(tensors), row) for row in TOKENS])
    assert np.abs(logits_of(model, tokens) - expected).max() <= 2e-5 * np.abs(expected).max()


def test_the_published_config_is_given_back():
    path = pathlib.Path(__file__).with_name("qwen_1_8b.json")
    published = json.loads(path.read_text())
    config = read_hf_config(published)
    assert (config.max_positions, config.bounded_positions, config.eos_ids) == (8192, True, (151643,))
    assert config.ffn(0).dim == 5504
    written = write_hf_config(config)
    assert {key: written.get(key) for key in published} == published
    assert sum(math.prod(shape) for shape in expected_tensors(published).values()) == 1_836_828_672


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 95}, "intermediate_size=95 must be even"),
        ({"kv_channels": 16}, "num_attention_heads * kv_channels is hidden_size = 32, not 4 * 16"),
        ({"scale_attn_weights": False}, "'scale_attn_weights' is False"),
        ({"use_cache_quantization": True}, "'use_cache_quantization' is True"),
        ({"seq_length": None}, "it has no 'seq_length'"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(InputError, match="config.json") as error:
        read_hf_config({**SMALL, **changes})
    assert message in str(error.value)
