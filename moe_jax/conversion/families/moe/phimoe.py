"""Phi-3.5-MoE: LayerNorms, and experts that are weighted by SparseMixer.

Outside of training, SparseMixer takes the two experts of the largest logits. The weight of each is its probability in
a softmax over those logits that are near its own, the better expert left out for the second; the two do not sum to 1.
Here this is computed in training, too, without the noise that the published training draws.
"""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import SCORE, Family
from moe_jax.conversion.families.rope_keys import read_rope
from moe_jax.conversion.families.windows import write_window
from moe_jax.conversion.table import FUSED, PER_EXPERT, linear
from moe_jax.core.errors import InputError, shown
from moe_jax.functional.routing.gates import MIXER_JITTER
from moe_jax.models import ModelConfig, RopeConfig

_SCALES = ("short_mscale", "long_mscale")


def _read(config: HFConfig) -> ModelConfig:
    # How near is near; the noise on the router's input is of training alone.
    config.must_be("router_jitter_noise", MIXER_JITTER)
    config.must_be("num_experts_per_tok", 2)
    attention = usual.read_attention(
        config, biases=usual.read_biases(config), sliding_window=config.integer("sliding_window")
    )
    moe = usual.read_moe(config, config.required_integer("num_local_experts"), gate="sparse_mixer")
    layers = usual.repeat_layers(config, attention, moe)
    rope, head_bias = _read_rope(config, attention.head_dim), config.flag("lm_head_bias")
    return usual.read_decoder(config, "phimoe", layers, norm="layer", rope=rope, head_bias=head_bias)


def _read_rope(config: HFConfig, head_dim: int) -> RopeConfig:
    """Reads the rotary embedding; LongRoPE has its magnitude under keys of its own, for short and for long texts."""
    values = {**(config.mapping("rope_parameters") or {}), **(config.mapping("rope_scaling") or {})}
    scales = [values.pop(key, None) for key in _SCALES]
    if scales[0] != scales[1]:
        raise InputError(f"config.json: rope short_mscale={shown(scales[0])} and long_mscale={shown(scales[1])} differ")
    if scales[0] is not None:
        values["attention_factor"] = scales[0]
    theta = values.pop("rope_theta", config.required_number("rope_theta"))
    parts = HFConfig({"rope_scaling": values or None, "rope_theta": theta}, {})
    rope = read_rope(parts, max_positions=config.required_integer("max_position_embeddings"), head_dim=head_dim)
    if rope.scaling not in ("none", "longrope") or (rope.scaling == "longrope") == (scales[0] is None):
        raise InputError("config.json: 'phimoe' models have rope type 'longrope', with short_mscale and long_mscale")
    return rope


def _write(config: ModelConfig) -> dict[str, Any]:
    moe = usual.uniform_moe(config)
    keys = {
        **usual.write_decoder(config),
        **usual.write_biases(config),
        **usual.write_ffn(moe.expert),
        **usual.write_moe(moe, "num_local_experts"),
        **write_window(config),
        "router_jitter_noise": MIXER_JITTER,
        "lm_head_bias": config.head_bias,
    }
    scaling = keys["rope_scaling"]
    if scaling is not None:
        factor = scaling.pop("attention_factor", None)
        keys["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling, **dict.fromkeys(_SCALES, factor)}
    return keys


PHIMOE = Family(
    name="phimoe",
    architecture="PhimoeForCausalLM",
    classifier=SCORE,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_key_value_heads": 8,
        "intermediate_size": 6400,
        "attention_bias": False,
        "lm_head_bias": False,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.01,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    harmless=("input_jitter_noise", "original_max_position_embeddings"),
    read=_read,
    write=_write,
    balance_over="model",
    table=(
        *usual.EMBEDDING,
        *usual.PLAIN_ATTENTION,
        *linear("model.layers.{i}.block_sparse_moe.gate", "layers/{i}/mlp/router", PER_EXPERT),
        *linear("model.layers.{i}.mlp.router", "layers/{i}/mlp/router", FUSED),
        *usual.gated_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        *usual.HEAD,
    ),
)
