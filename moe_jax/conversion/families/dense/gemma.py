"""Gemma: a scaled embedding, norms with factors of one plus their weight, an FFN gated by the approximate GELU."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.family import (
    EMBEDDING,
    GATED_FFN,
    HEAD,
    PLAIN_ATTENTION,
    SCORE,
    Family,
    dense_ffn,
    num_layers,
    read_activation,
    read_attention,
    read_decoder,
    write_activation,
    write_decoder,
)
from moe_jax.conversion.families.parts.gemma_norms import (
    DEFAULTS,
    read_biases,
    read_embed_scale,
    refuse_bidirectional,
    write_biases,
)
from moe_jax.core.errors import InputError, shown
from moe_jax.models import FFNConfig, LayerConfig, ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    refuse_bidirectional(config)
    config.require("head_dim", "intermediate_size")
    layer = LayerConfig(
        attention=read_attention(config, biases=read_biases(config)),
        mlp=FFNConfig(
            dim=config.required_integer("intermediate_size"), gated=True, activation=_read_activation(config)
        ),
    )
    layers = [layer] * num_layers(config)
    return read_decoder(config, "gemma", layers, norm="rms_plus_one", embed_scale=read_embed_scale(config))


def _read_activation(config: HFConfig) -> Any:
    """Reads `hidden_act`, in which the first configs said "gelu" and meant the approximate one."""
    found = "gelu_tanh" if config.text("hidden_act") == "gelu" else read_activation(config)
    # Transformers 4 reads this key if it is given, Transformers 5 does not.
    if config.given("hidden_activation") and read_activation(config, "hidden_activation") != found:
        raise InputError(
            f"config.json: hidden_act is {shown(config.text('hidden_act'))}, but hidden_activation is "
            f"{shown(config.text('hidden_activation'))}; keep one"
        )
    config.text("hidden_activation")
    return found


def _write(config: ModelConfig) -> dict[str, Any]:
    ffn = dense_ffn(config)
    return {
        **write_decoder(config),
        "intermediate_size": ffn.dim,
        "hidden_act": write_activation(ffn),
        "hidden_activation": write_activation(ffn),
        **write_biases(config),
    }


FAMILY = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    classifier=SCORE,
    defaults={**DEFAULTS, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    read=_read,
    write=_write,
    table=(*EMBEDDING, *PLAIN_ATTENTION, *GATED_FFN, *HEAD),
)
