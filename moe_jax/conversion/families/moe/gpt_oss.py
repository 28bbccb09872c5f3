"""gpt-oss: every head has a sink, experts have biases and a clamped SwiGLU, and every second layer a window."""

from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.rope_keys import read_rope
from moe_jax.conversion.families.windows import read_windows, write_layer_types
from moe_jax.conversion.table import Row, Table, linear, norm
from moe_jax.core.errors import InputError, shown
from moe_jax.kernels.plain import SWIGLU_LIMIT
from moe_jax.models import LayerConfig, ModelConfig, RopeConfig

_ACTIVATION = "swiglu_clamped"
# The activation that the clamps belong to; `hidden_act` is a word for it that no code reads.
_CLAMPED = {"hidden_act": "silu", "swiglu_limit": SWIGLU_LIMIT, "swiglu_alpha": 1.702}


def _read(config: HFConfig) -> ModelConfig:
    for key, value in _CLAMPED.items():
        config.must_be(key, value)
    biases = usual.read_biases(config)
    windows = read_windows(config, slides=lambda i: i % 2 == 0)
    moe = usual.read_moe(config, config.required_integer("num_local_experts"), gate="topk_softmax", router_bias=True)
    moe = replace(moe, expert=replace(moe.expert, activation=_ACTIVATION, bias=True))
    attention = usual.read_attention(config, biases=biases, sinks=True)
    layers = [LayerConfig(attention=replace(attention, sliding_window=window), mlp=moe) for window in windows]
    return usual.read_decoder(config, "gpt_oss", layers, rope=_read_rope(config, attention.head_dim))


def _read_rope(config: HFConfig, head_dim: int) -> RopeConfig:
    """Reads the rotary embedding; a config that says nothing of it means the scaling of the published models."""
    if config.given("rope_scaling") or config.given("rope_parameters"):
        max_positions = config.required_integer("max_position_embeddings")
        return read_rope(config, max_positions=max_positions, head_dim=head_dim)
    yarn: Any = dict(scaling="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
    return RopeConfig(theta=config.required_number("rope_theta"), original_max_positions=4096, **yarn)


def _write(config: ModelConfig) -> dict[str, Any]:
    moe = usual.uniform_moe(config)
    if moe.expert.activation != _ACTIVATION:
        raise InputError(
            f"in the format of 'gpt_oss' experts have the activation {_ACTIVATION!r}, and not "
            f"{shown(moe.expert.activation)}"
        )
    keys = usual.write_decoder(config)
    if config.rope.scaling == "none":
        keys["rope_scaling"] = {"rope_type": "default"}  # nothing would mean the scaling of the published models
    return {
        **keys,
        **usual.write_biases(config),
        **write_layer_types(config),
        **usual.write_moe(moe, "num_local_experts"),
        "intermediate_size": moe.expert.dim,
        **{key: value for key, value in _CLAMPED.items() if key != "swiglu_alpha"},
    }


def _experts() -> Table:
    """Returns the rows of the experts: whole layers, not transposed, and the columns of gate and up take turns."""
    theirs, ours = "model.layers.{i}.mlp.experts", "layers/{i}/mlp/experts"
    both = {part: (f"{ours}/gate/{part}", f"{ours}/up/{part}") for part in ("kernel", "bias")}
    return (
        Row(f"{theirs}.gate_up_proj", both["kernel"], interleaved=True),
        Row(f"{theirs}.gate_up_proj_bias", both["bias"], interleaved=True),
        Row(f"{theirs}.down_proj", f"{ours}/down/kernel"),
        Row(f"{theirs}.down_proj_bias", f"{ours}/down/bias"),
    )


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    defaults={
        "hidden_act": "silu",
        "swiglu_limit": SWIGLU_LIMIT,
        "swiglu_alpha": 1.702,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "attention_bias": True,
        "intermediate_size": 2880,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
    },
    # The first says again what `num_experts_per_tok` says; the second is the original length of the rope scaling.
    harmless=("experts_per_token", "initial_context_length"),
    read=_read,
    write=_write,
    balance_over="model",
    table=(
        *usual.EMBEDDING,
        *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
        Row("model.layers.{i}.self_attn.sinks", "layers/{i}/attention/sinks"),
        *usual.PROJECTIONS,
        *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/mlp_norm"),
        *linear("model.layers.{i}.mlp.router", "layers/{i}/mlp/router"),
        *_experts(),
        *usual.HEAD,
    ),
)
