"""DeepSeekMoE 16B, DeepSeek-V2 (also V2-Lite), DeepSeek-V3 (also R1, and Kimi-K2): MoEs above some dense layers."""

import math
from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.latent_attention import (
    LATENT_ATTENTION,
    read_latent_attention,
    write_latent_decoder,
)
from moe_jax.conversion.families.moe.usual_moe import (
    FURTHER,
    MOE_MLP,
    above_dense,
    check_further,
    read_balanced,
    read_moe_layers,
    write_balanced,
    write_moe_layers,
)
from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.models import (
    AttentionConfig,
    LayerConfig,
    ModelConfig,
    SelectionConfig,
)

_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "seq_aux": True,
}
_LATENT_DEFAULTS = {
    **_DEFAULTS,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

# Transformers derives them and ignores the values in a file.
_DERIVED_WIDTHS = ("head_dim", "qk_head_dim")

# The number of devices that experts were split over.
_TRAINING_KEYS = ("ep_size",)


def _read_layers(config: HFConfig, attention: AttentionConfig, **moe_fields: Any) -> list[LayerConfig]:
    """Reads dense layers and MoEs: from `first_k_dense_replace` on, every `moe_layer_freq`-th layer is an MoE.

    Further keywords, on the gate and its selection, go to `MoEConfig`.
    """
    step = config.integer("moe_layer_freq")
    step = 1 if step is None else step
    if step < 1:
        raise InputError(f"config.json: moe_layer_freq={step} must be at least 1")
    # Without experts all layers are dense.
    moes = [i for i in above_dense(config) if config.integer("n_routed_experts") is not None and i % step == 0]
    count = usual.num_layers(config)
    coefficient = (config.number("aux_loss_alpha") or 0.0) if moes else 0.0
    # Of a batch, or of every sequence.
    losses = {"balance_coef": 0.0, "sequence_balance_coef": 0.0}
    losses["sequence_balance_coef" if config.flag("seq_aux") else "balance_coef"] = coefficient
    return read_moe_layers(config, [attention] * count, moes, **losses, **moe_fields)


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that `_read_layers` reads."""
    moes = config.moe_layers
    first = moes[0] if moes else config.num_layers
    follow = moes == tuple(range(first, config.num_layers))
    which = {"first_k_dense_replace": first, "moe_layer_freq": 1 if follow else math.gcd(*moes)}
    coefficient: dict[str, Any] = {}
    if moes:
        moe = config.moe(first)
        of_sequences = moe.sequence_balance_coef > 0 or moe.balance_coef == 0
        value = moe.sequence_balance_coef if of_sequences else moe.balance_coef
        coefficient = {"aux_loss_alpha": value, "seq_aux": of_sequences}
    return {**which, **write_moe_layers(config, nothing_shared=None), **coefficient}


# --- DeepSeekMoE 16B, the first: plain attention, and code that comes with the checkpoint ---------


def _read_v1(config: HFConfig) -> ModelConfig:
    config.must_be("scoring_func", "softmax")
    attention = usual.read_attention(config, biases=usual.read_biases(config))
    usual.check_heads_fill_width(config, attention, "deepseek")
    # The weight of a single expert is not renormalised.
    renormalised = config.flag("norm_topk_prob") and config.integer("num_experts_per_tok") != 1
    gate = "topk_softmax" if renormalised else "softmax_topk"
    return usual.read_decoder(config, "deepseek", _read_layers(config, attention, gate=gate))


def _write_v1(config: ModelConfig) -> dict[str, Any]:
    keys = usual.write_decoder(config) | _write_layers(config) | usual.write_biases(config)
    if config.moe_layers:
        keys["norm_topk_prob"] = config.moe(config.moe_layers[0]).gate == "topk_softmax"
    return keys


DEEPSEEK = Family(
    name="deepseek",
    own_code=True,
    architecture="DeepseekForCausalLM",
    # From the config class that comes with the checkpoint.
    defaults={
        **_DEFAULTS,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "aux_loss_alpha": 0.001,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
    },
    harmless=_TRAINING_KEYS,
    read=_read_v1,
    write=_write_v1,
    table=(*usual.EMBEDDING, *usual.PLAIN_ATTENTION, *MOE_MLP, *usual.HEAD),
)

# --- DeepSeek-V2: latent attention, and experts that may be chosen from the best groups of them ---

_GREEDY, _IN_GROUPS = "greedy", "group_limited_greedy"


def _read_v2(config: HFConfig) -> ModelConfig:
    config.must_be("scoring_func", "softmax")
    config.must_be("mlp_bias", False)
    config.must_be("moe_layer_freq", 1)
    # False in all released checkpoints. If true, the code that came with them renormalises and does not scale, and
    # Transformers scales and does not renormalise.
    config.must_be("norm_topk_prob", False)
    attention = read_latent_attention(config, interleaved=True)
    layers = _read_layers(
        config,
        attention,
        gate="softmax_topk",
        gate_scale=config.required_number("routed_scaling_factor"),
        selection=_read_selection(config),
    )
    return usual.read_decoder(config, "deepseek_v2", layers)


def _read_selection(config: HFConfig) -> SelectionConfig:
    method = config.text("topk_method")
    if method == _GREEDY:
        return SelectionConfig()
    if method != _IN_GROUPS:
        hint = nearest(method, (_GREEDY, _IN_GROUPS)) if method else ""
        raise InputError(f"config.json: unknown topk_method {shown(method)}{hint}; known: {_GREEDY}, {_IN_GROUPS}")
    return SelectionConfig(groups=config.required_integer("n_group"), top_groups=config.required_integer("topk_group"))


def _write_v2(config: ModelConfig) -> dict[str, Any]:
    keys = write_latent_decoder(config) | _write_layers(config)
    if config.moe_layers:
        moe = config.moe(config.moe_layers[0])
        keys |= {"routed_scaling_factor": moe.gate_scale, "topk_method": _GREEDY}
        if moe.selection.groups > 1:
            groups = {"n_group": moe.selection.groups, "topk_group": moe.selection.top_groups}
            keys |= {"topk_method": _IN_GROUPS, **groups}
    return keys


DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    defaults={
        **_LATENT_DEFAULTS,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": _GREEDY,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    # Only the method other than `greedy` uses groups.
    harmless=("n_group", "topk_group", *_DERIVED_WIDTHS, *_TRAINING_KEYS),
    read=_read_v2,
    write=_write_v2,
    table=(*usual.EMBEDDING, *LATENT_ATTENTION, *MOE_MLP, *usual.HEAD),
)

# --- DeepSeek-V3: sigmoid scores with a selection bias, which keeps experts in balance ------------


def _read_v3(config: HFConfig, family: str = "deepseek_v3") -> ModelConfig:
    config.must_be("scoring_func", "sigmoid")
    config.must_be("topk_method", "noaux_tc")
    config.must_be("moe_layer_freq", 1)
    check_further(config)
    attention = read_latent_attention(config, interleaved=config.flag("rope_interleave"))
    return usual.read_decoder(config, family, _read_layers(config, attention, **read_balanced(config)))


def _write_v3(config: ModelConfig) -> dict[str, Any]:
    latent = config.layers[0].softmax_attention.latent
    keys = write_latent_decoder(config) | _write_layers(config)
    keys |= {"rope_interleave": latent is not None and latent.interleaved, "num_nextn_predict_layers": 0}
    if config.moe_layers:
        keys |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", **write_balanced(config)}
    return keys


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={
        **_LATENT_DEFAULTS,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    harmless=(*_DERIVED_WIDTHS, *_TRAINING_KEYS),
    read=_read_v3,
    write=_write_v3,
    table=(*usual.EMBEDDING, *LATENT_ATTENTION, *MOE_MLP, *usual.HEAD),
    further=FURTHER,
    further_form="deepseek",
)

# Kimi-K2 is a DeepSeek-V3 of other sizes, whose config.json has a name of its own and names the class of DeepSeek's.
KIMI_K2 = replace(DEEPSEEK_V3, name="kimi_k2", read=lambda config: _read_v3(config, "kimi_k2"), own_code=True)
