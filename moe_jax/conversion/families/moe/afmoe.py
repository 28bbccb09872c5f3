"""AFMoE (Arcee Trinity): gated attention, four norms in a layer, and windows on most layers, which alone rotate."""

import math
from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.moe.usual_moe import (
    SHARED_EXPERTS,
    above_dense,
    read_moe_layers,
    renamed,
    write_first_dense,
    write_moe_layers,
)
from moe_jax.conversion.families.windows import UNROTATED, read_windows, slides_but_every, write_layer_types
from moe_jax.conversion.table import Row, linear, norm
from moe_jax.models import ModelConfig, SelectionConfig

# How the family calls the keys that `usual_moe` reads and writes.
_NAMES = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
}
# What published configs say of choices that Transformers has made for all of them.
_AS_PUBLISHED = {"n_group": 1, "num_expert_groups": 1, "num_limited_groups": 1, "topk_group": 1, "route_norm": True,
                 "score_func": "sigmoid"}  # fmt: skip


def _read(config: HFConfig) -> ModelConfig:
    for key, value in _AS_PUBLISHED.items():
        config.must_be(key, value)
    biases = usual.read_biases(config)
    attention = [
        usual.read_attention(
            config,
            biases=biases,
            qk_norm="head",
            sliding_window=window,
            rope=UNROTATED if window is None else None,
            output_gate=True,
        )
        for window in read_windows(config, slides=slides_but_every(config, "global_attn_every_n_layers"))
    ]
    layers = read_moe_layers(
        config,
        attention,
        above_dense(config),
        gate="topk_sigmoid",
        gate_scale=config.required_number("route_scale"),
        selection=SelectionConfig(bias=True),
        balance_coef=0.0,
    )
    layers = [replace(layer, norm_position="both") for layer in layers]
    scale = math.sqrt(config.required_size("hidden_size")) if config.flag("mup_enabled") else 1.0
    return usual.read_decoder(config, "afmoe", layers, embed_scale=scale)


def _write(config: ModelConfig) -> dict[str, Any]:
    moes = config.moe_layers
    return {
        **usual.write_decoder(config),
        **usual.write_biases(config),
        "sliding_window": config.max_positions,
        **write_layer_types(config),
        **renamed(write_first_dense(config) | write_moe_layers(config), _NAMES),
        **({"route_scale": config.moe(moes[0]).gate_scale} if moes else {}),
        "mup_enabled": config.embed_scale != 1.0,
    }


AFMOE = Family(
    name="afmoe",
    architecture="AfmoeForCausalLM",
    names=_NAMES,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "head_dim": 128,
        "attention_bias": False,
        "intermediate_size": 6144,
        "moe_intermediate_size": 1408,
        "num_dense_layers": 1,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "route_scale": 1.0,
        "global_attn_every_n_layers": 4,
        "sliding_window": 1024,
        "mup_enabled": False,
    },
    harmless=("load_balance_coeff", "use_grouped_mm"),  # of training, and of how it is computed
    read=_read,
    write=_write,
    table=(
        *usual.EMBEDDING,
        *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
        *usual.PROJECTIONS,
        *linear("model.layers.{i}.self_attn.gate_proj", "layers/{i}/attention/gate"),
        *usual.QK_NORMS,
        *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/attention_output_norm"),
        *norm("model.layers.{i}.pre_mlp_layernorm", "layers/{i}/mlp_norm"),
        *linear("model.layers.{i}.mlp.router.gate", "layers/{i}/mlp/router"),
        Row("model.layers.{i}.mlp.expert_bias", "layers/{i}/mlp/router/selection_bias"),
        *usual.gated_experts(),
        *SHARED_EXPERTS,
        *usual.GATED_FFN,
        *norm("model.layers.{i}.post_mlp_layernorm", "layers/{i}/mlp_output_norm"),
        *usual.HEAD,
    ),
)
