"""OLMo 2 and 3, and FlexOlmo: norms after the branches and over whole projections of queries and keys."""

from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import SCORE, Family
from moe_jax.conversion.families.rope_keys import write_rope_parameters
from moe_jax.conversion.families.windows import FULL, SLIDING, read_ropes, read_windows, write_layer_types
from moe_jax.conversion.table import Table, norm
from moe_jax.models import FFNConfig, LayerConfig, ModelConfig, MoEConfig

_DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "intermediate_size": 11008,
    "attention_bias": False,
    "eos_token_id": 50279,
}


def _layer(config: HFConfig, mlp: FFNConfig | MoEConfig, **kwargs: Any) -> LayerConfig:
    """Reads a layer with this FFN or MoE; further keywords are for its attention."""
    attention = usual.read_attention(config, biases=usual.read_biases(config), qk_norm="projection", **kwargs)
    return LayerConfig(attention=attention, mlp=mlp, norm_position="output")


_ATTENTION: Table = (
    *usual.PROJECTIONS,
    *usual.QK_NORMS,
    *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/attention_norm"),
    *norm("model.layers.{i}.post_feedforward_layernorm", "layers/{i}/mlp_norm"),
)

# --- OLMo 2 ---------------------------------------------------------------------------------------


def _read_olmo2(config: HFConfig) -> ModelConfig:
    layers = [_layer(config, usual.read_gated_ffn(config))] * usual.num_layers(config)
    return usual.read_decoder(config, "olmo2", layers)


OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    classifier=SCORE,
    defaults=_DEFAULTS,
    read=_read_olmo2,
    write=lambda config: usual.write_dense(config) | usual.write_biases(config),
    table=(*usual.EMBEDDING, *_ATTENTION, *usual.GATED_FFN, *usual.HEAD),
    moe_formats=("flex_olmo",),
)

# --- OLMo 3: most layers have a window, and those without may rotate in another way ---------------


def _read_olmo3(config: HFConfig) -> ModelConfig:
    ropes = read_ropes(config, dict.fromkeys((FULL, SLIDING), "rope_theta"))
    local = None if ropes[SLIDING] == ropes[FULL] else ropes[SLIDING]
    ffn = usual.read_gated_ffn(config)
    layers = [
        _layer(config, ffn, sliding_window=window, rope=None if window is None else local)
        for window in read_windows(config, slides=lambda i: (i + 1) % 4 != 0)
    ]
    return usual.read_decoder(config, "olmo3", layers, rope=ropes[FULL])


def _write_olmo3(config: ModelConfig) -> dict[str, Any]:
    keys = usual.write_dense(config) | usual.write_biases(config)
    types = write_layer_types(config)
    sliding = [i for i, kind in enumerate(types["layer_types"]) if kind == SLIDING]
    local = config.rope
    if sliding:
        local = usual.same_in_all_layers(config, "rotary embedding of windows", config.rope_of, among=sliding)
    if local.theta != config.rope.theta:
        del keys["rope_theta"]  # it would speak of both
    # Transformers 5 takes the base of windows from here alone, and Transformers 4 does not read it.
    by_type = {FULL: write_rope_parameters(config.rope), SLIDING: write_rope_parameters(local)}
    return {**keys, "sliding_window": None, **types, "rope_parameters": by_type}


OLMO3 = replace(
    OLMO2,
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults=_DEFAULTS | {"rope_theta": 500000.0, "sliding_window": 4096},
    read=_read_olmo3,
    write=_write_olmo3,
    moe_formats=(),
)

# --- FlexOlmo: OLMo 2 with an MoE in every layer --------------------------------------------------


def _read_flex_olmo(config: HFConfig) -> ModelConfig:
    moe = usual.read_moe(config, config.required_integer("num_experts"), gate=usual.read_gate(config))
    return usual.read_decoder(config, "flex_olmo", [_layer(config, moe)] * usual.num_layers(config))


def _write_flex_olmo(config: ModelConfig) -> dict[str, Any]:
    moe = usual.uniform_moe(config)
    return {
        **usual.write_decoder(config),
        **usual.write_ffn(moe.expert),
        **usual.write_moe(moe),
        **usual.write_biases(config),
    }


FLEX_OLMO = Family(
    name="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "router_aux_loss_coef": 0.01,
        "norm_topk_prob": False,
        "eos_token_id": 100257,
    },
    read=_read_flex_olmo,
    write=_write_flex_olmo,
    balance_over="model",
    table=(*usual.EMBEDDING, *_ATTENTION, *usual.ROUTER, *usual.gated_experts(), *usual.HEAD),
)
