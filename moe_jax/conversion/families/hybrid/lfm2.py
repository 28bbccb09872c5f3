"""LFM2, dense and with MoEs: gated short convolutions in most layers, attention with q/k norms in the others."""

from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.moe.usual_moe import above_dense
from moe_jax.conversion.families.windows import FULL, read_layer_types
from moe_jax.conversion.table import Row, Table, linear, norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig, SelectionConfig
from moe_jax.models.recurrent_config import ShortConvConfig

_CONV = "conv"
_DENSE_LAYERS = "num_dense_layers"

# --- keys -----------------------------------------------------------------------------------------


def _read_decoder(config: HFConfig, family: str, layers: list[LayerConfig]) -> ModelConfig:
    """Reads what all layers share. An older key for tied embeddings takes precedence, as in Transformers."""
    tied = {"tie_embeddings": config.flag("tie_embedding")} if config.given("tie_embedding") else {}
    model = usual.read_decoder(config, family, layers, eps="norm_eps")
    # Another name of `rope_theta` in the first checkpoints.
    config.must_be("theta", model.rope.theta)
    return replace(model, **tied)


def _read_mixers(config: HFConfig, types: tuple[str, ...]) -> list[AttentionConfig | ShortConvConfig]:
    """Reads the attention, or the short convolution, of layers of these types."""
    if FULL not in types:
        raise InputError(f"config.json: of {len(types)} layers none has attention; models without any are unsupported")
    attention = usual.read_attention(config, qk_norm="head")
    convolution = ShortConvConfig(
        channels=config.required_size("hidden_size"),
        conv_width=config.required_integer("conv_L_cache"),
        bias=config.flag("conv_bias"),
    )
    return [convolution if kind == _CONV else attention for kind in types]


def _write_mixers(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that `_read_decoder` and `_read_mixers` read, and the types of layers."""
    if not config.softmax_layers:
        raise InputError(f"in the format of {config.family!r} at least one layer has attention")
    keys = usual.write_decoder(config, eps="norm_eps")
    keys["layer_types"] = [_CONV if layer.is_recurrent else FULL for layer in config.layers]
    if not config.recurrent_layers:
        return keys
    convolution = usual.same_in_all_layers(
        config, "short convolution", lambda layer: layer.attention, among=config.recurrent_layers
    )
    if not isinstance(convolution, ShortConvConfig):
        raise InputError(f"the format of {config.family!r} has short convolutions, not a {convolution.describe()}")
    return keys | {"conv_L_cache": convolution.conv_width, "conv_bias": convolution.bias}


def _ffn(config: HFConfig, dim: int) -> FFNConfig:
    """Returns a gated FFN, whose activation no config says."""
    config.must_be("hidden_act", "silu")
    return FFNConfig(dim=dim, gated=True, activation="silu")


_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "conv_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Initial values, widths that are said elsewhere, and what the layers of all checkpoints have.
_HARMLESS = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc"),
)

# --- dense ----------------------------------------------------------------------------------------


def _read(config: HFConfig) -> ModelConfig:
    ffn = _ffn(config, _read_dim(config))
    layers = [LayerConfig(attention=one, mlp=ffn) for one in _read_mixers(config, _read_types(config))]
    return _read_decoder(config, "lfm2", layers)


def _read_types(config: HFConfig) -> tuple[str, ...]:
    """Reads the type of every layer; older configs list those with attention."""
    types, listed = read_layer_types(config, _CONV), config.integers("full_attn_idxs", lists_only=True)
    if types is not None:
        return types
    count = usual.num_layers(config)
    if not config.given("full_attn_idxs"):
        return (FULL,) * count
    if beyond := [i for i in listed if not 0 <= i < count]:
        raise InputError(f"config.json: full_attn_idxs has {shown(beyond[0])}, but there are {count} layers")
    return tuple(FULL if i in listed else _CONV for i in range(count))


def _read_dim(config: HFConfig) -> int:
    """Reads the width of the FFN, which is two thirds of what the config says, rounded up, unless told otherwise."""
    older = config.integer("block_ff_dim")
    dim = config.required_integer("intermediate_size") if older is None else older
    adjusts, multiplier = config.flag("block_auto_adjust_ff_dim"), config.number("block_ffn_dim_multiplier")
    multiple = config.required_integer("block_multiple_of")
    if not adjusts:
        return dim
    dim = int(2 * dim / 3)
    if multiplier is None:
        return dim
    if multiple < 1 or multiplier <= 0:
        raise InputError(
            f"config.json: block_multiple_of={multiple} and block_ffn_dim_multiplier={multiplier} must be above 0"
        )
    return -(-int(multiplier * dim) // multiple) * multiple


def _write(config: ModelConfig) -> dict[str, Any]:
    dim = usual.dense_ffn(config).dim
    return {
        **_write_mixers(config),
        "intermediate_size": dim,
        "block_auto_adjust_ff_dim": False,
        # Read by vLLM.
        "block_dim": config.d_model,
        "block_ff_dim": dim,
        "conv_dim": config.d_model,
    }


# --- with MoEs ------------------------------------------------------------------------------------


def _read_moes(config: HFConfig) -> ModelConfig:
    config.require("layer_types")
    mixers = _read_mixers(config, read_layer_types(config, _CONV) or ())
    moes = above_dense(config, _DENSE_LAYERS)
    moe = _read_moe(config) if len(moes) else None
    ffn = _ffn(config, config.required_integer("intermediate_size")) if len(moes) < len(mixers) else None
    mlps: list[Any] = [moe if i in moes else ffn for i in range(len(mixers))]
    layers = [LayerConfig(attention=one, mlp=mlp) for one, mlp in zip(mixers, mlps, strict=True)]
    return _read_decoder(config, "lfm2_moe", layers)


def _read_moe(config: HFConfig) -> MoEConfig:
    return MoEConfig(
        expert=_ffn(config, config.required_integer("moe_intermediate_size")),
        num_experts=config.required_integer("num_experts"),
        top_k=config.required_integer("num_experts_per_tok"),
        gate="topk_sigmoid" if config.flag("norm_topk_prob") else "sigmoid_topk",
        gate_scale=config.required_number("routed_scaling_factor"),
        selection=SelectionConfig(bias=config.flag("use_expert_bias")),
        balance_coef=0.0,  # the published code has no balance loss
    )


def _write_moes(config: ModelConfig) -> dict[str, Any]:
    mixed = usual.write_mixed(
        config,
        lambda moe: {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "norm_topk_prob": moe.gate == "topk_sigmoid",
            "routed_scaling_factor": moe.gate_scale,
            "use_expert_bias": moe.selection.bias,
        },
    )
    first = config.moe_layers[0] if config.moe_layers else config.num_layers
    mixed.pop("hidden_act")
    return {**_write_mixers(config), _DENSE_LAYERS: first, **mixed, "conv_dim": config.d_model}


# --- tensors --------------------------------------------------------------------------------------

_THEIRS, _OURS = "model.layers.{i}.conv", "layers/{i}/attention"
_CONVOLUTION = f"{_THEIRS}.conv.weight"


def _output(tensor: str, **only: str) -> Table:
    """Returns the rows of the last map of a mixer, for layers with one kind of them only."""
    return tuple(replace(row, **only) for row in linear(tensor, f"{_OURS}/o"))


def _mixers() -> Table:
    inputs = {
        part: tuple(f"{_OURS}/{one}/{part}" for one in ("in_gate", "out_gate", "v")) for part in ("kernel", "bias")
    }
    return (
        *norm("model.layers.{i}.operator_norm", "layers/{i}/attention_norm"),
        Row(f"{_THEIRS}.in_proj.weight", inputs["kernel"], transpose=True),
        Row(f"{_THEIRS}.in_proj.bias", inputs["bias"]),
        Row(_CONVOLUTION, f"{_OURS}/conv", transpose=True),
        Row(f"{_THEIRS}.conv.bias", f"{_OURS}/conv_bias"),
        *_output(f"{_THEIRS}.out_proj", beside=f"{_OURS}/conv"),
        *(row for name in "qkv" for row in _of_attention(name)),
        *_output("model.layers.{i}.self_attn.out_proj", without=f"{_OURS}/conv"),
        *norm("model.layers.{i}.self_attn.q_layernorm", f"{_OURS}/q_norm"),
        *norm("model.layers.{i}.self_attn.k_layernorm", f"{_OURS}/k_norm"),
        *norm("model.layers.{i}.ffn_norm", "layers/{i}/mlp_norm"),
    )


def _of_attention(name: str) -> Table:
    rows = linear(f"model.layers.{{i}}.self_attn.{name}_proj", f"{_OURS}/{name}")
    return tuple(replace(row, without=f"{_OURS}/conv") for row in rows)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of the convolution's kernel, which has a further axis, for `Family.shapes`."""
    if not config.recurrent_layers:
        return {}
    window, channels, _ = config.layers[config.recurrent_layers[0]].recurrence.carried
    return {_CONVOLUTION: (sum(channels), 1, window + 1)}


_FEED_FORWARD = "model.layers.{i}.feed_forward"
_HEAD: Table = (*norm("model.embedding_norm", "final_norm"), *usual.LM_HEAD)
_FFN: Table = tuple(
    row
    for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    for row in linear(f"{_FEED_FORWARD}.{theirs}", f"layers/{{i}}/mlp/{ours}")
)

LFM2 = Family(
    name="lfm2",
    architecture="Lfm2ForCausalLM",
    defaults={
        **_DEFAULTS,
        "intermediate_size": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    harmless=_HARMLESS,
    read=_read,
    write=_write,
    table=(*usual.EMBEDDING, *_mixers(), *_FFN, *_HEAD),
    moe_formats=("lfm2_moe",),
    shapes=_shapes,
    recurrent=True,
)

LFM2_MOE = Family(
    name="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    defaults={
        **_DEFAULTS,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        _DENSE_LAYERS: 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    },
    harmless=_HARMLESS,
    read=_read_moes,
    write=_write_moes,
    table=(
        *usual.EMBEDDING,
        *_mixers(),
        *linear(f"{_FEED_FORWARD}.gate", "layers/{i}/mlp/router"),
        Row(f"{_FEED_FORWARD}.expert_bias", "layers/{i}/mlp/router/selection_bias"),
        *usual.gated_experts("feed_forward", gate="w1", up="w3", down="w2", fused_block="feed_forward"),
        *_FFN,
        *_HEAD,
    ),
    shapes=_shapes,
    recurrent=True,
)
