"""Gemma 2: four norms in a layer, soft caps on scores and logits, a sliding window on every second layer."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.family import (
    EMBEDDING,
    GATED_FFN,
    HEAD,
    SCORE,
    Family,
    dense_ffn,
    read_attention,
    read_decoder,
    read_gated_ffn,
    same_in_all_layers,
    write_activation,
    write_decoder,
)
from moe_jax.conversion.families.parts.gemma_norms import (
    DEFAULTS,
    FOUR_NORMS,
    read_biases,
    read_embed_scale,
    read_scale,
    refuse_bidirectional,
    write_biases,
    write_scale,
)
from moe_jax.conversion.families.parts.which_layers import SLIDING, read_layer_types, write_layer_types
from moe_jax.models import LayerConfig, ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    refuse_bidirectional(config)
    config.require("head_dim")
    types, window = read_layer_types(config, full_every=2)
    biases, scale, soft_cap = read_biases(config), read_scale(config), config.number("attn_logit_softcapping")
    ffn = read_gated_ffn(config, activation="hidden_activation")
    layers = [
        LayerConfig(
            attention=read_attention(
                config,
                biases=biases,
                scale=scale,
                score_soft_cap=soft_cap,
                sliding_window=window if kind == SLIDING else None,
            ),
            mlp=ffn,
            norm_position="both",
        )
        for kind in types
    ]
    return read_decoder(
        config,
        "gemma2",
        layers,
        norm="rms_plus_one",
        embed_scale=read_embed_scale(config),
        logit_soft_cap=config.number("final_logit_softcapping"),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    ffn = dense_ffn(config)
    soft_cap = same_in_all_layers(config, "soft cap on scores", lambda layer: layer.attention.score_soft_cap)
    return {
        **write_decoder(config),
        "intermediate_size": ffn.dim,
        "hidden_activation": write_activation(ffn),
        **write_biases(config),
        **write_scale(config),
        "attn_logit_softcapping": soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        **write_layer_types(config),
    }


FAMILY = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    classifier=SCORE,
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    # Transformers reads the activation and the window from other keys.
    harmless=("cache_implementation", "hidden_act", "sliding_window_size"),
    read=_read,
    write=_write,
    table=(*EMBEDDING, *FOUR_NORMS, *GATED_FFN, *HEAD),
)
