"""The decoder against Transformers on the same weights: random small models of every family, float32."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.convert import HuggingFaceDirectory
from moe_jax.loading import load_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
CASES = {
    "llama": {},
    "llama-tied-mha": dict(num_key_value_heads=4, tie_word_embeddings=True),
    "llama-biases-wide-heads": dict(attention_bias=True, mlp_bias=True, head_dim=16, num_key_value_heads=1),
    "llama-gelu": dict(hidden_act="gelu"),
    "llama-linear-rope": dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    "llama-dynamic-rope": dict(
        rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4), max_position_embeddings=24
    ),
    "llama-yarn-rope": dict(
        rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=16)
    ),
    "llama-yarn-mscale-rope": dict(
        rope_parameters=dict(
            rope_type="yarn",
            factor=4.0,
            rope_theta=1e4,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=0.7,
            beta_fast=16.0,
            beta_slow=2.0,
        )
    ),
    "llama-llama3-rope": dict(
        rope_parameters=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
            rope_theta=1e4,
        )
    ),
    "llama-longrope": dict(
        rope_parameters=dict(
            rope_type="longrope",
            factor=4.0,
            rope_theta=1e4,
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[2.0, 2.5, 3.0, 4.0],
            original_max_position_embeddings=16,
        )
    ),
    "mistral-window": dict(sliding_window=8),
    "mistral": dict(sliding_window=None, head_dim=12),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen2-window": dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": dict(head_dim=16),
    "qwen3-tied-mha": dict(head_dim=8, num_key_value_heads=4, tie_word_embeddings=True),
    "qwen3-biases-window": dict(
        head_dim=12, attention_bias=True, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3-yarn-rope-one-kv-head": dict(
        head_dim=24,
        num_key_value_heads=1,
        rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e6, original_max_position_embeddings=16),
    ),
    "qwen3-layer-types": dict(
        head_dim=16,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "stablelm": {},
    "stablelm-biases-mha": dict(use_qkv_bias=True, num_key_value_heads=4, tie_word_embeddings=True),
    "stablelm-parallel-head-norms": dict(use_parallel_residual=True, qk_layernorm=True),
    "stablelm-head-norms-half-rotated": dict(
        qk_layernorm=True, use_qkv_bias=True, num_key_value_heads=1, partial_rotary_factor=0.5, layer_norm_eps=1e-2
    ),
    "stablelm-whole-heads-gelu": dict(partial_rotary_factor=1.0, use_parallel_residual=True, hidden_act="gelu"),
    "stablelm-yarn-rope": dict(
        rope_parameters=dict(
            rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=16, partial_rotary_factor=0.5
        )
    ),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "mixtral-top3-window": dict(num_local_experts=5, num_experts_per_tok=3, sliding_window=8, head_dim=16),
    "olmoe": dict(num_experts=16, num_experts_per_tok=8, norm_topk_prob=False),
    "olmoe-clipped-normalised": dict(num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, clip_qkv=0.5),
    "qwen3_moe": dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
    "qwen3_moe-biases-not-normalised": dict(
        num_experts=16,
        num_experts_per_tok=8,
        moe_intermediate_size=12,
        norm_topk_prob=False,
        attention_bias=True,
        num_key_value_heads=1,
    ),
    "qwen3_moe-every-second-tied": dict(
        head_dim=12,
        num_hidden_layers=4,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        tie_word_embeddings=True,
        num_key_value_heads=4,
    ),
    "qwen3_moe-first-dense-window": dict(
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=24,
        norm_topk_prob=False,
        mlp_only_layers=[0],
        use_sliding_window=True,
        sliding_window=8,
    ),
    "phi": dict(num_key_value_heads=4),
    "phi-grouped-tied": dict(tie_word_embeddings=True, layer_norm_eps=0.1),
    # As in Phi-2, 0.4 of a head is rotated.
    "phi-wide-heads": dict(
        head_dim=20, num_key_value_heads=1, rope_parameters=dict(rope_theta=50.0, partial_rotary_factor=0.4)
    ),
    "phi-whole-rotation-gelu": dict(
        hidden_act="gelu",
        rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4, partial_rotary_factor=1.0),
    ),
    "phi-dynamic-rope": dict(
        max_position_embeddings=24, rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    ),
}
CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
    "phi": ("PhiConfig", "PhiForCausalLM"),
}


def random_transformers_model(name):
    """A model whose every parameter is random and large enough to matter, biases and norms included."""
    config_class, model_class = (getattr(transformers, c) for c in CLASSES[name.split("-")[0]])
    model = model_class._from_config(config_class(**{**SMALL, **CASES[name]}), attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in parameter_name else 0.15 * noise)
    return model.float().eval()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name, tmp_path, strict_numerics):
    reference = random_transformers_model(name)
    reference.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, 40))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens), use_cache=False).logits.numpy()
    assert np.std(expected) > 0.1  # otherwise equality would say little
    model = load_model(HuggingFaceDirectory(tmp_path))
    got = model(jnp.asarray(tokens, jnp.int32)).logits
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)
