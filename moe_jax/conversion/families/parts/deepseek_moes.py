"""Common parts of the DeepSeek families: MoEs above some dense layers, with shared experts, and latent attention.

The shared experts of a layer are stored as one FFN as wide as all of them together, and that is what they are: an FFN
that sees every token with weight 1.
"""

import dataclasses
import math
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.family import (
    GATED_FFN,
    gated_experts,
    num_layers,
    read_gated_ffn,
    same_in_all_layers,
    uniform_moe,
    write_activation,
    write_decoder,
)
from moe_jax.conversion.families.parts.rope_keys import read_rope
from moe_jax.conversion.table import Row, Table, linear, norm
from moe_jax.core.errors import InputError
from moe_jax.models import (
    AttentionConfig,
    FFNConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    SelectionConfig,
)

MLP: Table = (
    *linear("model.layers.{i}.mlp.gate", "layers/{i}/mlp/router"),
    Row("model.layers.{i}.mlp.gate.e_score_correction_bias", "layers/{i}/mlp/router/selection_bias"),
    *gated_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *linear("model.layers.{i}.mlp.shared_experts.gate_proj", "layers/{i}/mlp/universal/gate"),
    *linear("model.layers.{i}.mlp.shared_experts.up_proj", "layers/{i}/mlp/universal/up"),
    *linear("model.layers.{i}.mlp.shared_experts.down_proj", "layers/{i}/mlp/universal/down"),
    *GATED_FFN,
)

LATENT_ATTENTION: Table = (
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

# Transformers derives them and ignores the values in a file.
DERIVED_WIDTHS = ("head_dim", "qk_head_dim")

# `seq_aux`: here the balance loss is taken over a batch, not over each sequence; `ep_size`: the number of devices that
# experts were split over.
TRAINING_KEYS = ("seq_aux", "ep_size")


def read_layers(
    config: HFConfig, attention: AttentionConfig, *, gate: str, scale: float = 1.0, selection: SelectionConfig
) -> list[LayerConfig]:
    """Reads dense layers and MoEs: from `first_k_dense_replace` on, every `moe_layer_freq`-th layer is an MoE."""
    first, step = config.required_integer("first_k_dense_replace"), config.integer("moe_layer_freq")
    step = 1 if step is None else step
    if first < 0 or step < 1:
        raise InputError(
            f"config.json: first_k_dense_replace={first} must be at least 0, and moe_layer_freq={step} at least 1"
        )
    # Without experts all layers are dense.
    num_experts = config.integer("n_routed_experts")
    moes = {i for i in range(num_layers(config)) if num_experts is not None and i >= first and i % step == 0}
    # Widths that no layer has stay unread, and are written back.
    moe = _read_moe(config, num_experts or 0, gate, scale, selection) if moes else None
    ffn = read_gated_ffn(config) if len(moes) < num_layers(config) else None
    layers = []
    for i in range(num_layers(config)):
        mlp = moe if i in moes else ffn
        assert mlp is not None
        layers.append(LayerConfig(attention=attention, mlp=mlp))
    return layers


def _read_moe(config: HFConfig, num_experts: int, gate: str, scale: float, selection: SelectionConfig) -> MoEConfig:
    expert = read_gated_ffn(config, dim="moe_intermediate_size")
    shared = config.integer("n_shared_experts") or 0
    if shared < 0:
        raise InputError(f"config.json: n_shared_experts={shared} must not be negative")
    return MoEConfig(
        expert=expert,
        num_experts=num_experts,
        top_k=config.required_integer("num_experts_per_tok"),
        gate=gate,
        gate_scale=scale,
        selection=selection,
        balance_coef=config.number("aux_loss_alpha") or 0.0,
        universal="one" if shared else "none",
        universal_dim=shared * expert.dim if shared else None,
    )


def write_layers(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that `read_layers` reads, except for the gate and its selection.

    Raises:
      InputError: if dense layers, or MoEs, differ; or shared experts are no multiple of an expert.
    """
    moes = config.moe_layers
    first = moes[0] if moes else config.num_layers
    follow = moes == tuple(range(first, config.num_layers))
    keys: dict[str, Any] = {
        "first_k_dense_replace": first,
        "moe_layer_freq": 1 if follow else math.gcd(*moes),
    }
    dense = [i for i in range(config.num_layers) if i not in moes]
    if dense:
        ffn = same_in_all_layers(config, "FFN of dense layers", lambda layer: layer.mlp, among=dense)
        assert isinstance(ffn, FFNConfig)
        keys |= {"intermediate_size": ffn.dim, "hidden_act": write_activation(ffn)}
    if moes:
        moe = uniform_moe(config, among=moes)
        keys |= {
            "moe_intermediate_size": moe.expert.dim,
            "hidden_act": write_activation(moe.expert),
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": _num_shared(config, moe),
            "num_experts_per_tok": moe.top_k,
            "aux_loss_alpha": moe.balance_coef,
        }
    return keys


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


def read_latent_attention(config: HFConfig, *, interleaved: bool) -> AttentionConfig:
    """Reads multi-head latent attention; its scale depends on the rotary embedding.

    Raises:
      InputError: if there are fewer key-value heads than heads, or rotations that latent attention does not have.
    """
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


def write_latent_decoder(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys that `read_decoder` and `read_latent_attention` read.

    Raises:
      InputError: if a layer has other attention, or layers differ.
    """
    attention = same_in_all_layers(config, "attention", lambda layer: layer.attention)
    latent = attention.latent
    if latent is None:
        raise InputError(f"the format of {config.family!r} has latent attention only")
    keys = write_decoder(config) | {
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
