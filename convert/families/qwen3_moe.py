"""Qwen3-MoE: Qwen3 with MoEs in all layers, or in every n-th but for some that are named; the others are dense."""

import math
from typing import Any

from moe_jax.convert.families._shared import (
    ATTENTION,
    EMBEDDING,
    GATED_FFN,
    HEAD,
    Family,
    gated_experts,
    num_layers,
    read_attention,
    read_decoder,
    read_gated_ffn,
    same_in_all_layers,
    uniform_moe,
    write_activation,
    write_decoder,
)
from moe_jax.convert.foreign_config import ForeignConfig
from moe_jax.convert.table import linear
from moe_jax.errors import InputError
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig


def read(config: ForeignConfig) -> ModelConfig:
    # Unlike in Qwen3, the window is that of all layers: `max_window_layers` and `layer_types` mean nothing here.
    window = config.integer("sliding_window") if config.flag("use_sliding_window") else None
    biases = ("q", "k", "v", "o") if config.flag("attention_bias") else ()
    attention = read_attention(config, biases=biases, qk_norm="head", sliding_window=window)
    moe_layers = _read_moe_layers(config)
    moe = _read_moe(config) if moe_layers else None
    # A width of dense layers that no layer has stays foreign.
    ffn = read_gated_ffn(config) if len(moe_layers) < num_layers(config) else None
    layers = []
    for i in range(num_layers(config)):
        mlp = moe if i in moe_layers else ffn
        assert mlp is not None
        layers.append(LayerConfig(attention=attention, mlp=mlp))
    return read_decoder(config, "qwen3_moe", layers)


def _read_moe_layers(config: ForeignConfig) -> set[int]:
    """Indices of the layers that are MoEs: every `decoder_sparse_step`-th, less those that are named as dense."""
    step, dense = config.required_integer("decoder_sparse_step"), config.integers("mlp_only_layers", lists_only=True)
    if step < 1:
        raise InputError(f"config.json: decoder_sparse_step={step} must be at least 1")
    return set(range(step - 1, num_layers(config), step)) - set(dense)


def _read_moe(config: ForeignConfig) -> MoEConfig:
    config.require("num_experts_per_tok", "router_aux_loss_coef")
    return MoEConfig(
        expert=read_gated_ffn(config, dim="moe_intermediate_size"),
        num_experts=_read_num_experts(config),
        top_k=config.required_integer("num_experts_per_tok"),
        gate="topk_softmax" if config.flag("norm_topk_prob") else "softmax_topk",
        balance_coef=config.required_number("router_aux_loss_coef"),
    )


def _read_num_experts(config: ForeignConfig) -> int:
    """Transformers 4 writes `num_experts`, Transformers 5 `num_local_experts`."""
    if not config.given("num_local_experts"):
        return config.required_integer("num_experts")
    new = config.required_integer("num_local_experts")
    if config.given("num_experts") and config.integer("num_experts") != new:
        raise InputError(
            f"config.json: num_local_experts is {new}, but num_experts is {config.integer('num_experts')}; keep one"
        )
    return new


def write(config: ModelConfig) -> dict[str, Any]:
    dense = [i for i in range(config.num_layers) if i not in config.moe_layers]
    # The largest step that passes every MoE; without any, all layers are named.
    step = math.gcd(*(i + 1 for i in config.moe_layers)) or 1
    window = same_in_all_layers(config, "sliding window", lambda layer: layer.attention.sliding_window)
    keys: dict[str, Any] = {
        **write_decoder(config),
        "attention_bias": same_in_all_layers(config, "attention bias", lambda layer: bool(layer.attention.biases)),
        "use_sliding_window": window is not None,
        "decoder_sparse_step": step,
        "mlp_only_layers": [i for i in dense if (i + 1) % step == 0],
    }
    if window is not None:
        keys["sliding_window"] = window
    if dense:
        same_in_all_layers(config, "FFN of dense layers", lambda layer: layer.mlp, among=dense)
        ffn = config.ffn(dense[0])
        keys |= {"intermediate_size": ffn.dim, "hidden_act": write_activation(ffn)}
    if config.moe_layers:
        moe = uniform_moe(config, among=config.moe_layers)
        keys |= {
            "moe_intermediate_size": moe.expert.dim,
            "hidden_act": write_activation(moe.expert),
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "norm_topk_prob": moe.gate == "topk_softmax",
            "router_aux_loss_coef": moe.balance_coef,
        }
    return keys


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "intermediate_size": 6144,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    # The window is that of all layers.
    harmless=("max_window_layers", "layer_types"),
    read=read,
    write=write,
    table=(
        *EMBEDDING,
        *ATTENTION,
        *linear("model.layers.{i}.mlp.gate", "layers/{i}/mlp/router"),
        *gated_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *GATED_FFN,
        *HEAD,
    ),
)
