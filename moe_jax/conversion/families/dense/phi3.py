"""Phi-3 and Phi-4: queries, keys and values in one tensor, and both matrices into the FFN in another."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import SCORE, Family
from moe_jax.conversion.families.windows import write_window
from moe_jax.conversion.table import joined_qkv, linear, norm
from moe_jax.core.errors import InputError
from moe_jax.models import ModelConfig

# What configs of Phi-4 say of choices that no published model makes otherwise.
_AS_PUBLISHED = {
    "attention_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
}


def _read(config: HFConfig) -> ModelConfig:
    for key, value in _AS_PUBLISHED.items():
        config.must_be(key, value)
    attention = usual.read_attention(config, sliding_window=config.integer("sliding_window"))
    layers = usual.repeat_layers(config, attention, usual.read_gated_ffn(config))
    model = usual.read_decoder(config, "phi3", layers)
    if model.rope.scaling not in ("none", "longrope"):
        raise InputError(
            f"config.json: the format of 'phi3' has rope type 'longrope' alone, not {model.rope.scaling!r}"
        )
    return model


def _write(config: ModelConfig) -> dict[str, Any]:
    keys = usual.write_dense(config) | write_window(config)
    scaling = keys["rope_scaling"]
    if scaling is not None:
        # The code that came with the checkpoints wants these three keys and no other. What the others would say follows
        # from the lengths.
        original = scaling.pop("original_max_position_embeddings")
        if scaling["factor"] == config.max_positions / original:
            del scaling["factor"]
        keys["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    return keys


PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    classifier=SCORE,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "intermediate_size": 8192,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
    read=_read,
    write=_write,
    table=(
        *usual.EMBEDDING,
        *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
        *joined_qkv("model.layers.{i}.self_attn.qkv_proj"),
        *linear("model.layers.{i}.self_attn.o_proj", "layers/{i}/attention/o"),
        *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/mlp_norm"),
        *usual.JOINED_FFN,
        *usual.HEAD,
    ),
    moe_formats=("mixtral",),
)
