"""Gemma 4, without inputs of single layers and shared keys: dense, or with an FFN beside the experts of every layer."""

import math
from collections.abc import Mapping
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.rope_keys import read_rope, write_rope_parameters
from moe_jax.conversion.families.windows import FULL, SLIDING, read_layer_types, write_layer_types
from moe_jax.conversion.table import Row, Table, norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig, RopeConfig

# Without `layer_types`, every so many-th layer sees all; the last one does in any case.
_FULL_EVERY = 6
_ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}

# --- reading --------------------------------------------------------------------------------------


def _read(config: HFConfig) -> ModelConfig:
    for key, why in (
        ("hidden_size_per_layer_input", "inputs of single layers, as Gemma 4 E2B and E4B have them,"),
        ("num_kv_shared_layers", "keys and values that several layers share, as in Gemma 4 E2B and E4B,"),
    ):
        if config.integer(key):
            raise InputError(f"config.json: {key} is {config.integer(key)}: {why} are not supported")
    if config.text("use_bidirectional_attention") == "all":
        raise InputError("config.json: use_bidirectional_attention is 'all', and only text that sees backwards is read")
    types, d_model = _read_types(config), config.required_size("hidden_size")
    heads = _read_heads(config, types)
    ropes = _read_ropes(config, heads)
    attention = {kind: _read_attention(config, kind, heads[kind], ropes[kind]) for kind in _ROPES}
    mlp = _read_moe(config) if config.flag("enable_moe_block") else _read_ffn(config, "intermediate_size")
    layers = [
        LayerConfig(attention=attention[kind], mlp=mlp, norm_position="both", output_scale=True) for kind in types
    ]
    return usual.read_decoder(
        config,
        "gemma4_text",
        layers,
        rope=ropes[FULL],
        embed_scale=math.sqrt(d_model),  # rounded to the dtype of the activations, as in Transformers
        logit_soft_cap=config.number("final_logit_softcapping"),
    )


def _read_types(config: HFConfig) -> tuple[str, ...]:
    types = read_layer_types(config)
    if types is None:
        types = tuple(SLIDING if (i + 1) % _FULL_EVERY else FULL for i in range(usual.num_layers(config)))
    return (*types[:-1], FULL)


def _read_heads(config: HFConfig, types: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Reads the width of a head, and the number of heads of keys, for each type of layer.

    Published configs have two keys for layers that see all; newer releases of Transformers list those layers instead.
    """
    same = config.required_integer("head_dim"), config.required_integer("num_key_value_heads")
    width, count = config.required_integer("global_head_dim"), config.integer("num_global_key_value_heads")
    listed = config.mapping("per_layer_config")
    if listed is None:
        return {SLIDING: same, FULL: (width, count if config.flag("attention_k_eq_v") and count else same[1])}
    found: dict[str, tuple[int, int]] = {}
    own = {int(key) if key.isdecimal() else -1: value for key, value in listed.items()}
    for i, kind in enumerate(types):
        keys = own.pop(i, {})
        if not isinstance(keys, dict) or not keys.keys() <= {"head_dim", "num_key_value_heads"}:
            raise InputError(
                f"config.json: per_layer_config of layer {i} is {shown(keys)}, expected head_dim and "
                "num_key_value_heads at most"
            )
        one = HFConfig(keys, {"head_dim": same[0], "num_key_value_heads": same[1]})
        here = one.required_integer("head_dim"), one.required_integer("num_key_value_heads")
        if found.setdefault(kind, here) != here:
            raise InputError(
                f"config.json: per_layer_config says {here} of layer {i} (head_dim, num_key_value_heads), and "
                f"{found[kind]} of other layers of the type {kind!r}"
            )
    if own:
        raise InputError(f"config.json: per_layer_config names layers that are not there, of {len(types)}")
    return {SLIDING: same, **found}


def _read_ropes(config: HFConfig, heads: Mapping[str, tuple[int, int]]) -> dict[str, RopeConfig]:
    given = config.mapping("rope_parameters") or _ROPES
    if not given.keys() <= _ROPES.keys() or not all(isinstance(one, dict) for one in given.values()):
        raise InputError(
            f"config.json: rope_parameters has {shown(sorted(given))}, expected objects for {FULL!r} and {SLIDING!r}"
        )
    ropes, positions = {}, config.required_integer("max_position_embeddings")
    for kind in _ROPES:
        one = HFConfig({"rope_parameters": given.get(kind, _ROPES[kind])}, {})
        ropes[kind] = read_rope(one, max_positions=positions, head_dim=heads[kind][0])
        config.unknown_inside(f"rope_parameters.{kind}", one.unread_keys().get("rope_scaling", ()))
    return ropes


def _read_attention(config: HFConfig, kind: str, heads: tuple[int, int], rope: RopeConfig) -> AttentionConfig:
    """Reads the attention of a type of layer: those that see all may have keys as values."""
    head_dim, kv_heads = heads
    alike = kind == FULL and config.flag("attention_k_eq_v")
    biases: Any = tuple(name for name in usual.read_biases(config) if name != "v" or not alike)
    return AttentionConfig(
        num_heads=config.required_integer("num_attention_heads"),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        biases=biases,
        scale=1.0,
        qk_norm="head",
        value_norm=True,
        values_are_keys=alike,
        sliding_window=config.required_integer("sliding_window") if kind == SLIDING else None,
        rope=rope if kind == SLIDING else None,
    )


def _read_ffn(config: HFConfig, dim: str) -> FFNConfig:
    return usual.read_gated_ffn(config, dim=dim, activation="hidden_activation")


def _read_moe(config: HFConfig) -> MoEConfig:
    """Reads experts, and the FFN beside them, which both have norms of their own."""
    return MoEConfig(
        expert=_read_ffn(config, "moe_intermediate_size"),
        num_experts=config.required_integer("num_experts"),
        top_k=config.required_integer("top_k_experts"),
        balance_coef=0.0,
        universal="one",
        universal_dim=config.required_integer("intermediate_size"),
        branch_norm_eps=config.required_number("rms_norm_eps"),
        expert_scales=True,
    )


# --- writing --------------------------------------------------------------------------------------


def _write(config: ModelConfig) -> dict[str, Any]:
    types = write_layer_types(config)
    kinds = types["layer_types"]
    first = {kind: kinds.index(kind) for kind in (SLIDING, FULL) if kind in kinds}
    for kind in first:
        among = [i for i, one in enumerate(kinds) if one == kind]
        usual.same_in_all_layers(config, f"attention of {kind}", lambda layer: layer.attention, among=among)
    full = config.layers[first[FULL]].softmax_attention if FULL in first else None
    if full is None:
        raise InputError("in the format of 'gemma4_text' the last layer sees all, and has no sliding window")
    narrow = config.layers[first.get(SLIDING, first[FULL])].softmax_attention
    ropes = {kind: write_rope_parameters(config.rope_of(config.layers[i])) for kind, i in first.items()}
    keys: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": full.num_heads,
        "num_key_value_heads": narrow.num_kv_heads,
        "num_global_key_value_heads": full.num_kv_heads if full.values_are_keys else None,
        "head_dim": narrow.head_dim,
        "global_head_dim": full.head_dim,
        "attention_k_eq_v": full.values_are_keys,
        "attention_bias": bool(full.biases),
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "final_logit_softcapping": config.logit_soft_cap,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "torch_dtype": config.dtype,
        **usual.write_tokens(config),
        **types,
        "rope_parameters": {**_ROPES, **ropes},
    }
    if not config.moe_layers:
        return keys | usual.write_ffn(usual.dense_ffn(config), activation="hidden_activation")
    moe = usual.uniform_moe(config)
    return keys | {
        "enable_moe_block": True,
        "num_experts": moe.num_experts,
        "top_k_experts": moe.top_k,
        "moe_intermediate_size": moe.expert.dim,
        "intermediate_size": moe.universal_ffn.dim,
        "hidden_activation": usual.write_activation(moe.expert),
    }


# --- tensors --------------------------------------------------------------------------------------

_LAYER, _OURS = "model.layers.{i}", "layers/{i}"
_MLP = f"{_OURS}/mlp"

_NORMS: Table = (
    *norm(f"{_LAYER}.input_layernorm", f"{_OURS}/attention_norm"),
    *norm(f"{_LAYER}.post_attention_layernorm", f"{_OURS}/attention_output_norm"),
    *norm(f"{_LAYER}.pre_feedforward_layernorm", f"{_OURS}/mlp_norm"),
    *norm(f"{_LAYER}.post_feedforward_layernorm", f"{_OURS}/mlp_output_norm"),
    # Of a layer with experts, the norm before the FFN is that of the FFN alone.
    *norm(f"{_LAYER}.pre_feedforward_layernorm", f"{_MLP}/universal_norm"),
    *norm(f"{_LAYER}.post_feedforward_layernorm_1", f"{_MLP}/universal_output_norm"),
    *norm(f"{_LAYER}.pre_feedforward_layernorm_2", f"{_MLP}/experts_norm"),
    *norm(f"{_LAYER}.post_feedforward_layernorm_2", f"{_MLP}/experts_output_norm"),
)

GEMMA4_TEXT = Family(
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_k_eq_v": False,
        "sliding_window": 512,
        "intermediate_size": 9216,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    # The first two belong to inputs of single layers and to shared keys, which are refused; the others to experts,
    # which another key switches on.
    harmless=(
        *("vocab_size_per_layer_input", "use_double_wide_mlp"),
        *("num_experts", "top_k_experts", "moe_intermediate_size"),
    ),
    read=_read,
    write=_write,
    table=(
        *usual.EMBEDDING,
        *_NORMS,
        *usual.PROJECTIONS,
        *usual.QK_NORMS,
        Row(f"{_LAYER}.layer_scalar", f"{_OURS}/output_scale"),
        Row(f"{_LAYER}.router.proj.weight", f"{_MLP}/router/kernel", transpose=True),
        Row(f"{_LAYER}.router.scale", f"{_MLP}/router/norm/scale"),
        Row(f"{_LAYER}.router.per_expert_scale", f"{_MLP}/router/expert_scale"),
        *usual.fused_experts(f"{_LAYER}.experts"),
        *usual.gated_ffn(f"{_LAYER}.mlp", f"{_MLP}/universal"),
        *usual.GATED_FFN,
        *usual.HEAD,
    ),
)
