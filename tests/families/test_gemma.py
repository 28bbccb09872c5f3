"""What of Gemma the comparison of logits in float32 does not show: rounding, keys of config.json, what is refused."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.conversion import read_hf_config, write_hf_config
from moe_jax.core.errors import InputError
from moe_jax.models import RopeConfig
from moe_jax.nn.layers import Embed, Norm
from tests.support.hf_checkpoints import CONFIGS

# As the hub has it: Transformers 4.50, without the types of layers.
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}


def test_the_scale_of_embeddings_is_rounded_to_the_dtype_of_the_activations():
    config = read_hf_config({**CONFIGS["gemma2"], "hidden_size": 3072, "torch_dtype": "bfloat16"})
    assert config.embed_scale == math.sqrt(3072)
    embed = Embed(config, rngs=nnx.Rngs(0), compute_dtype=jnp.bfloat16)
    found = embed.look_up(jnp.arange(64)[None])
    # sqrt(3072) = 55.43 lies between 55.25 and 55.5.
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[0], embed.embedding[...] * jnp.bfloat16(55.5))


def test_one_is_added_to_the_weights_of_norms_in_float32(strict_numerics):
    """In bfloat16, 1 + 1/300 would be 1."""
    norm = Norm("rms_plus_one", 8, 0.0, dtype=jnp.dtype(jnp.bfloat16))
    assert not norm.scale[...].any()
    norm.scale = nnx.Param(jnp.full(8, 1 / 300, jnp.bfloat16))
    weight = np.float32(norm.scale[0])
    np.testing.assert_allclose(norm(jnp.ones((1, 8), jnp.float32)), 1 + weight, rtol=1e-6)


def test_a_config_without_types_of_layers():
    config = read_hf_config(GEMMA_3_1B)
    windows = [layer.attention.sliding_window for layer in config.layers]
    assert windows == [None if i in (5, 11, 17, 23) else 512 for i in range(26)]
    assert config.rope_of(config.layers[0]) == RopeConfig(theta=1e4)
    assert config.rope_of(config.layers[5]) == RopeConfig(theta=1e6)
    assert (config.bos_id, config.eos_ids, config.tie_embeddings) == (2, (1, 106), True)
    assert config.layers[0].attention.scale == 1 / 16
    written = write_hf_config(config)
    assert {key: written[key] for key in GEMMA_3_1B if key in written} == {
        key: value for key, value in GEMMA_3_1B.items() if key in written
    }
    assert len(written["layer_types"]) == 26 and read_hf_config(written) == config


def test_windows_may_have_a_scaling_of_their_own():
    """Which only the newer style of config.json can say; without one, the older is written alone."""
    sliding = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    given = {"full_attention": full, "sliding_attention": sliding}
    config = read_hf_config({**GEMMA_3_1B, "rope_parameters": given})
    assert config.rope_of(config.layers[0]) == RopeConfig(theta=1e4, scaling="linear", factor=2.0)
    written = write_hf_config(config)
    assert written["rope_parameters"] == given and read_hf_config(written) == config
    assert "rope_parameters" not in write_hf_config(read_hf_config(GEMMA_3_1B))


@pytest.mark.parametrize("scalar", [144, 168, 224, 256, 10, 3, 0.7])
def test_the_scale_of_scores_is_written_as_it_was_read(scalar):
    config = {**CONFIGS["gemma2"], "query_pre_attn_scalar": scalar}
    assert write_hf_config(read_hf_config(config))["query_pre_attn_scalar"] == pytest.approx(scalar, rel=1e-15)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is True"),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "'attn_logit_softcapping' is 5.0, only None"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0.0 must be above 0"),
        ("gemma2", {"sliding_window": None}, "has no 'sliding_window', which cannot"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be at least 1"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "expected objects for 'full_attention' and"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}, "rope_theta": 8.0}, "keep one"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"x": 1}}}, "rope_parameters.sliding_attention.x"),
        ("gemma", {"hidden_activation": "gelu"}, "but hidden_activation is 'gelu'; keep one"),
    ],
)
def test_what_is_refused(family, changes, message):
    with pytest.raises(InputError, match="config.json") as error:
        read_hf_config({**CONFIGS[family], **changes})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_model_of_text_and_images_is_refused_in_a_line():
    with pytest.raises(InputError, match="language model alone"):
        read_hf_config({"model_type": "gemma3", "text_config": GEMMA_3_1B, "vision_config": {}})
