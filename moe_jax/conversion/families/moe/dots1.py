"""dots.llm1: q/k norms per head, perhaps windows on the last layers, and DeepSeek-V3's choice of experts."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.moe.usual_moe import (
    MOE_MLP,
    above_dense,
    read_balanced,
    read_moe_layers,
    write_balanced,
    write_first_dense,
    write_moe_layers,
)
from moe_jax.conversion.families.windows import read_windows, write_layer_types
from moe_jax.models import ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    biases, first = usual.read_biases(config), config.required_integer("max_window_layers")
    attention = [
        usual.read_attention(config, biases=biases, qk_norm="head", sliding_window=window)
        for window in read_windows(config, slides=lambda i: i >= first)
    ]
    layers = read_moe_layers(config, attention, above_dense(config), balance_coef=0.0, **read_balanced(config))
    return usual.read_decoder(config, "dots1", layers)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **usual.write_decoder(config),
        **usual.write_biases(config),
        # Both are written, as a window that is left out would be the default.
        "sliding_window": None,
        "max_window_layers": config.num_layers,
        **write_layer_types(config),
        **write_first_dense(config),
        **write_moe_layers(config),
        **write_balanced(config),
    }


DOTS1 = Family(
    name="dots1",
    architecture="Dots1ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 32,
        "attention_bias": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    read=_read,
    write=_write,
    table=(*usual.EMBEDDING, *usual.ATTENTION, *MOE_MLP, *usual.HEAD),
)
