"""DeepSeekMoE 16B, DeepSeek-V2 (also V2-Lite) and DeepSeek-V3 (also R1): MoEs above some dense layers.

The shared experts of a layer are stored as one FFN as wide as all of them together, and that is what they are: an FFN
that sees every token with weight 1.
"""

import dataclasses
import math
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.rope_keys import read_rope
from moe_jax.conversion.table import Row, Table, linear, norm
from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.models import (
    AttentionConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    SelectionConfig,
)

_MLP: Table = (
    *usual.ROUTER,
    Row("model.layers.{i}.mlp.gate.e_score_correction_bias", "layers/{i}/mlp/router/selection_bias"),
    *usual.gated_experts(),
    *usual.gated_ffn("model.layers.{i}.mlp.shared_experts", "layers/{i}/mlp/universal"),
    *usual.GATED_FFN,
)

_LATENT_ATTENTION: Table = (
    *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
    *linear("model.layers.{i}.self_attn.q_proj", "layers/{i}/attention/q"),
    *linear("model.layers.{i}.self_attn.q_a_proj", "layers/{i}/attention/q_down"),
    *norm("model.layers.{i}.self_attn.q_a_layernorm", "layers/{i}/attention/q_norm"),
    *linear("model.layers.{i}.self_attn.q_b_proj", "layers/{i}/attention/q_up"),
    *linear("model.layers.{i}.self_attn.kv_a_proj_with_mqa", "layers/{i}/attention/kv_down"),
    *norm("model.layers.{i}.self_attn.kv_a_layernorm", "layers/{i}/attention/kv_norm"),
    *linear("model.layers.{i}.self_attn.kv_b_proj", "layers/{i}/attention/kv_up"),
    *linear("model.layers.{i}.self_attn.o_proj", "layers/{i}/attention/o"),
    *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/mlp_norm"),
)

_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False}
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

# `seq_aux`: here the balance loss is taken over a batch, not over each sequence; `ep_size`: the number of devices that
# experts were split over.
_TRAINING_KEYS = ("seq_aux", "ep_size")


def _read_layers(config: HFConfig, attention: AttentionConfig, **moe_fields: Any) -> list[LayerConfig]:
    """Reads dense layers and MoEs: from `first_k_dense_replace` on, every `moe_layer_freq`-th layer is an MoE.

    Further keywords, on the gate and its selection, go to `MoEConfig`.
    """
    first, step = config.required_integer("first_k_dense_replace"), config.integer("moe_layer_freq")
    step = 1 if step is None else step
    if first < 0 or step < 1:
        raise InputError(
            f"config.json: first_k_dense_replace={first} must be at least 0, and moe_layer_freq={step} at least 1"
        )
    # Without experts all layers are dense.
    num_experts = config.integer("n_routed_experts")
    moes = {i for i in range(usual.num_layers(config)) if num_experts is not None and i >= first and i % step == 0}

    def read_moe() -> MoEConfig:
        expert = usual.read_gated_ffn(config, dim="moe_intermediate_size")
        shared = config.integer("n_shared_experts") or 0
        if shared < 0:
            raise InputError(f"config.json: n_shared_experts={shared} must not be negative")
        return MoEConfig(
            expert=expert,
            num_experts=num_experts or 0,
            top_k=config.required_integer("num_experts_per_tok"),
            balance_coef=config.number("aux_loss_alpha") or 0.0,
            universal="one" if shared else "none",
            universal_dim=shared * expert.dim if shared else None,
            **moe_fields,
        )

    return usual.mixed_layers(config, [attention] * usual.num_layers(config), moes, read_moe)


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that `_read_layers` reads."""
    moes = config.moe_layers
    first = moes[0] if moes else config.num_layers
    follow = moes == tuple(range(first, config.num_layers))

    def moe_keys(moe: MoEConfig) -> dict[str, Any]:
        return {
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": _num_shared(config, moe),
            "num_experts_per_tok": moe.top_k,
            "aux_loss_alpha": moe.balance_coef,
        }

    which = {"first_k_dense_replace": first, "moe_layer_freq": 1 if follow else math.gcd(*moes)}
    return {**which, **usual.write_mixed(config, moe_keys)}


def _num_shared(config: ModelConfig, moe: MoEConfig) -> int | None:
    if not moe.universal_beside:
        return None
    count, remainder = divmod(moe.universal_ffn.dim, moe.expert.dim)
    if remainder:
        raise InputError(
            f"in the format of {config.family!r} shared experts are a whole number of experts wide, but they are "
            f"{moe.universal_ffn.dim} wide and an expert {moe.expert.dim}"
        )
    return count


def _read_latent_attention(config: HFConfig, *, interleaved: bool) -> AttentionConfig:
    """Reads multi-head latent attention; its scale depends on the rotary embedding."""
    heads, kv_heads = config.required_integer("num_attention_heads"), config.integer("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        raise InputError(
            f"config.json: num_key_value_heads={kv_heads} must be num_attention_heads={heads}: latent attention makes "
            "keys and values for every head"
        )
    latent = LatentConfig(
        kv_rank=config.required_integer("kv_lora_rank"),
        rope_dim=config.required_integer("qk_rope_head_dim"),
        value_dim=config.required_integer("v_head_dim"),
        q_rank=config.integer("q_lora_rank"),
        interleaved=interleaved,
    )
    max_positions = config.required_integer("max_position_embeddings")
    rope = read_rope(config, max_positions=max_positions, head_dim=latent.rope_dim)
    if rope.fraction != 1.0:
        raise InputError(
            f"config.json: partial_rotary_factor is {rope.fraction}, but qk_rope_head_dim says what of a head is "
            "rotated; leave it out"
        )
    head_dim = config.required_integer("qk_nope_head_dim") + latent.rope_dim
    downs = ("kv_down", "o") if latent.q_rank is None else ("q_down", "kv_down", "o")
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        biases=downs if config.flag("attention_bias") else (),
        latent=latent,
    )
    return dataclasses.replace(attention, scale=_scale(config, attention, rope))


def _scale(config: HFConfig, attention: AttentionConfig, rope: RopeConfig) -> float | None:
    """Returns the scale of scores: YaRN's `mscale_all_dim` is in it twice, for queries and for keys."""
    if rope.scaling == "yarn":
        magnitude = 0.1 * (rope.mscale_all_dim or 0.0) * math.log(max(1.0, rope.factor)) + 1.0
        return None if magnitude == 1.0 else attention.score_scale * magnitude**2
    if rope.scaling != "none" and (config.unread_keys().get("rope_scaling") or {}).get("mscale_all_dim"):
        raise InputError(f"config.json: rope mscale_all_dim goes with type 'yarn', not with {rope.scaling!r}")
    return None


def _write_latent_decoder(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that `read_decoder` and `_read_latent_attention` read."""
    attention = usual.same_in_all_layers(config, "attention", lambda layer: layer.attention)
    latent = attention.latent
    if latent is None:
        raise InputError(f"the format of {config.family!r} has latent attention only")
    keys = usual.write_decoder(config) | {
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_nope_head_dim": attention.head_dim - latent.rope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "attention_bias": bool(attention.biases),
    }
    # Transformers means the rotated part by it, and derives it.
    del keys["head_dim"]
    scaling = keys["rope_scaling"]
    if scaling is not None and "rope_type" in scaling:
        # The code that came with the checkpoints knows this name; Transformers knows both names.
        keys["rope_scaling"] = {"type": scaling["rope_type"]} | {k: v for k, v in scaling.items() if k != "rope_type"}
    return keys


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
    table=(*usual.EMBEDDING, *usual.PLAIN_ATTENTION, *_MLP, *usual.HEAD),
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
    attention = _read_latent_attention(config, interleaved=True)
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
    keys = _write_latent_decoder(config) | _write_layers(config)
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
    table=(*usual.EMBEDDING, *_LATENT_ATTENTION, *_MLP, *usual.HEAD),
)

# --- DeepSeek-V3: sigmoid scores with a selection bias, which keeps experts in balance ------------


_FURTHER, _MOST_FURTHER = ("num_nextn_predict_layers", "num_mtp_layers"), 100


def _read_v3(config: HFConfig) -> ModelConfig:
    config.must_be("scoring_func", "sigmoid")
    config.must_be("topk_method", "noaux_tc")
    config.must_be("moe_layer_freq", 1)
    for key in _FURTHER:
        count = config.integer(key)
        if count is not None and not 0 <= count <= _MOST_FURTHER:
            raise InputError(f"config.json: {key}={count} must lie between 0 and {_MOST_FURTHER}")
    attention = _read_latent_attention(config, interleaved=config.flag("rope_interleave"))
    layers = _read_layers(
        config,
        attention,
        gate="topk_sigmoid" if config.flag("norm_topk_prob") else "sigmoid_topk",
        gate_scale=config.required_number("routed_scaling_factor"),
        selection=SelectionConfig(
            bias=True,
            groups=config.required_integer("n_group"),
            top_groups=config.required_integer("topk_group"),
            group_score="best_two",
        ),
    )
    return usual.read_decoder(config, "deepseek_v3", layers)


def _write_v3(config: ModelConfig) -> dict[str, Any]:
    latent = config.layers[0].attention.latent
    keys = _write_latent_decoder(config) | _write_layers(config)
    keys |= {"rope_interleave": latent is not None and latent.interleaved, "num_nextn_predict_layers": 0}
    if config.moe_layers:
        moe = config.moe(config.moe_layers[0])
        keys |= {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": moe.gate == "topk_sigmoid",
            "routed_scaling_factor": moe.gate_scale,
            "n_group": moe.selection.groups,
            "topk_group": moe.selection.top_groups,
        }
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
    table=(*usual.EMBEDDING, *_LATENT_ATTENTION, *_MLP, *usual.HEAD),
    further=_FURTHER,
)
