"""Shared by families of Qwen whose layers have the gated delta rule, but for every n-th one, which has attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.windows import FULL
from moe_jax.conversion.table import Ignored, Row, Table, linear, norm
from moe_jax.core.errors import InputError, shown
from moe_jax.models import AttentionConfig, DeltaRuleConfig, ModelConfig

_LINEAR = "linear_attention"
_INTERVAL = 4  # of layers with attention, where a config does not say it

DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Values of keys that a config leaves out, in all of these families."""

HARMLESS = ("full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
"""The first says what `layer_types` says; the next are of layers that are left out; states are always float32 here."""

# --- keys -----------------------------------------------------------------------------------------


def read_mixers(config: HFConfig) -> list[AttentionConfig | DeltaRuleConfig]:
    """Reads the attention, or the delta rule, of every layer."""
    # The convolutions have this activation too.
    config.must_be("hidden_act", "silu")
    config.must_be("attn_output_gate", True)
    attention = usual.read_attention(config, biases=usual.read_biases(config), qk_norm="head", output_gate=True)
    if attention.biases:
        attention = replace(attention, biases=attention.projections)
    rule = DeltaRuleConfig(
        num_heads=config.required_integer("linear_num_value_heads"),
        num_key_heads=config.required_integer("linear_num_key_heads"),
        key_dim=config.required_integer("linear_key_head_dim"),
        value_dim=config.required_integer("linear_value_head_dim"),
        conv_width=config.required_integer("linear_conv_kernel_dim"),
        norm_eps=config.required_number("rms_norm_eps"),
    )
    return [rule if kind == _LINEAR else attention for kind in _layer_types(config)]


def _layer_types(config: HFConfig) -> tuple[str, ...]:
    """Reads the kind of every layer: every n-th has attention unless the config lists them."""
    count, types = usual.num_layers(config), config.texts("layer_types")
    every = config.integer("full_attention_interval") or _INTERVAL
    if types is None:
        if every < 1:
            raise InputError(f"config.json: full_attention_interval={every} must be at least 1")
        types = tuple(_LINEAR if (i + 1) % every else FULL for i in range(count))
    if len(types) != count or not set(types) <= {_LINEAR, FULL}:
        raise InputError(
            f"config.json: layer_types has {len(types)} entries {shown(sorted(set(types)))}, "
            f"expected {count} (num_hidden_layers), each {_LINEAR!r} or {FULL!r}"
        )
    if FULL not in types:
        raise InputError(f"config.json: of {count} layers none has attention; models without any are not supported")
    return types


def write_mixers(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that `read_mixers` reads beside those of `usual.write_decoder`."""
    if not config.softmax_layers:
        raise InputError(f"in the format of {config.family!r} at least one layer has attention")
    if not config.recurrent_layers:
        raise InputError(f"in the format of {config.family!r} at least one layer has the gated delta rule")
    rule = usual.same_in_all_layers(
        config, "gated delta rule", lambda layer: layer.attention, among=config.recurrent_layers
    )
    if not isinstance(rule, DeltaRuleConfig):
        raise InputError(f"the format of {config.family!r} has the gated delta rule, not a {rule.describe()}")
    return {
        **usual.write_biases(config),
        "layer_types": [_LINEAR if layer.is_recurrent else FULL for layer in config.layers],
        "linear_num_value_heads": rule.num_heads,
        "linear_num_key_heads": rule.num_key_heads,
        "linear_key_head_dim": rule.key_dim,
        "linear_value_head_dim": rule.value_dim,
        "linear_conv_kernel_dim": rule.conv_width,
    }


# --- tensors --------------------------------------------------------------------------------------

_THEIRS, _OURS = "model.layers.{i}.linear_attn", "layers/{i}/attention"
_RULE_ONLY = "layers/{i}/attention/log_rate"
_QUERIES = "model.layers.{i}.self_attn.q_proj"
_CONVOLUTION = f"{_THEIRS}.conv1d.weight"


def _kernels(*names: str) -> tuple[str, ...]:
    return tuple(f"{_OURS}/{name}/kernel" for name in names)


def joined(tensor: str, *names: str) -> Row:
    """Returns the row of a linear map whose outputs are those of several projections of the delta rule."""
    return Row(f"{_THEIRS}.{tensor}.weight", _kernels(*names), transpose=True)


def mixers(*projections: Row) -> Table:
    """Returns the rows of norms, attention and the delta rule, given those of the rule's projections but the last."""
    attention = (
        # The outputs for a head are its queries, then its gates.
        Row(f"{_QUERIES}.weight", _kernels("q", "gate"), transpose=True),
        Row(f"{_QUERIES}.bias", tuple(f"{_OURS}/{name}/bias" for name in ("q", "gate"))),
        *(row for name in "kvo" for row in linear(f"model.layers.{{i}}.self_attn.{name}_proj", f"{_OURS}/{name}")),
        *usual.QK_NORMS,
    )
    rule = (
        *projections,
        Row(_CONVOLUTION, tuple(f"{_OURS}/{name}_conv" for name in "qkv"), transpose=True),
        Row(f"{_THEIRS}.dt_bias", f"{_OURS}/rate_bias"),
        Row(f"{_THEIRS}.A_log", f"{_OURS}/log_rate"),
        *norm(f"{_THEIRS}.norm", f"{_OURS}/norm"),
        *linear(f"{_THEIRS}.out_proj", f"{_OURS}/o"),
    )
    return (
        *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
        *(replace(row, without=_RULE_ONLY) for row in attention),
        *(replace(row, beside=_RULE_ONLY) for row in rule),
        *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/mlp_norm"),
    )


SHARED_EXPERT: Table = (
    *usual.ROUTER,
    *linear("model.layers.{i}.mlp.shared_expert_gate", "layers/{i}/mlp/router/universal"),
    *usual.gated_ffn("model.layers.{i}.mlp.shared_expert", "layers/{i}/mlp/universal"),
    *usual.gated_experts(),
)
"""Rows of an MoE with a shared expert, which the sigmoid of a linear map weights."""

FURTHER = Ignored(r"mtp\..*", "of layers that predict tokens after the next, which are no part of the decoder")
"""Their names have no number of a layer in the decoder."""


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of the convolutions' kernels, which have a further axis, for `Family.shapes`."""
    if not config.recurrent_layers:
        return {}
    rule = config.layers[config.recurrent_layers[0]].recurrence
    return {_CONVOLUTION: (sum(rule.carried.channels), 1, rule.carried.window + 1)}


def groups_of_queries(config: ModelConfig) -> Mapping[str, int]:
    """Returns the number of heads in the tensors of queries and their gates, for `Family.groups`."""
    heads = config.layers[config.softmax_layers[0]].softmax_attention.num_heads
    return {f"{_QUERIES}.{part}": heads for part in ("weight", "bias")}


def groups_of_key_heads(config: ModelConfig, *tensors: str) -> Mapping[str, int]:
    """Returns the number of heads of keys in some of the delta rule's tensors, for `Family.groups`."""
    if not config.recurrent_layers:
        return {}
    rule = config.layers[config.recurrent_layers[0]].recurrence
    return {f"{_THEIRS}.{tensor}.weight": rule.num_splits for tensor in tensors}
