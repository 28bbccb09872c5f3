"""Qwen2 (also Qwen2.5), Qwen3, and their MoEs: Qwen2-MoE (also Qwen1.5-MoE) and Qwen3-MoE."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import SCORE, Family
from moe_jax.conversion.families.windows import FULL, SLIDING, read_layer_types, write_layer_types, write_window
from moe_jax.conversion.table import linear
from moe_jax.core.errors import InputError
from moe_jax.models import AttentionConfig, LayerConfig, ModelConfig, MoEConfig, RecurrentConfig

_DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_MOE_DEFAULTS = _DEFAULTS | {"decoder_sparse_step": 1, "norm_topk_prob": False, "router_aux_loss_coef": 0.001}

# --- windows --------------------------------------------------------------------------------------


def _read_windows(
    config: HFConfig, *, slides: Callable[[int, int], bool] = lambda i, limit: i >= limit
) -> list[int | None]:
    """Reads the window of every layer. If windows are switched off, the keys about them stay unread.

    Without `layer_types`, a layer has the window if `slides(its index, max_window_layers)`.
    """
    count, types = usual.num_layers(config), read_layer_types(config)
    if not config.flag("use_sliding_window"):
        if types is not None and SLIDING in types:
            raise InputError(f"config.json: layer_types has {SLIDING!r}, but use_sliding_window is not true")
        if types is not None:
            config.keep("layer_types", list(types))
        return [None] * count
    window = config.integer("sliding_window")
    if types is None:
        limit = config.required_integer("max_window_layers")
        types = tuple(SLIDING if slides(i, limit) else FULL for i in range(count))
    return [window if kind == SLIDING else None for kind in types]


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    keys = write_layer_types(config)
    if "sliding_window" not in keys:
        return {"use_sliding_window": False}
    # Transformers 5 reads the types; older releases read the index of the first layer with a window.
    return {"use_sliding_window": True, **keys, "max_window_layers": keys["layer_types"].index(SLIDING)}


# --- dense and MoE layers -------------------------------------------------------------------------


def read_sparse_layers(
    config: HFConfig, attention: Sequence[AttentionConfig | RecurrentConfig], *, shared_expert: str | None = None
) -> list[LayerConfig]:
    """Reads layers with an MoE or an FFN; `shared_expert` is the key of the width of an expert that all tokens see."""
    step, dense = config.required_integer("decoder_sparse_step"), config.integers("mlp_only_layers", lists_only=True)
    if step < 1:
        raise InputError(f"config.json: decoder_sparse_step={step} must be at least 1")
    moes = set(range(step - 1, usual.num_layers(config), step)) - set(dense)
    return usual.mixed_layers(config, attention, moes, lambda: _read_moe(config, shared_expert))


def _read_moe(config: HFConfig, shared_expert: str | None) -> MoEConfig:
    return usual.read_moe(
        config,
        _read_num_experts(config),
        dim="moe_intermediate_size",
        gate=usual.read_gate(config),
        universal="none" if shared_expert is None else "sigmoid",
        universal_dim=None if shared_expert is None else config.required_integer(shared_expert),
    )


def _read_num_experts(config: HFConfig) -> int:
    """Reads `num_experts` (Transformers 4) or `num_local_experts` (Transformers 5, for some families)."""
    if not config.given("num_local_experts"):
        return config.required_integer("num_experts")
    new = config.required_integer("num_local_experts")
    if config.given("num_experts") and config.integer("num_experts") != new:
        raise InputError(
            f"config.json: num_local_experts is {new}, but num_experts is {config.integer('num_experts')}; keep one"
        )
    return new


def write_sparse_layers(config: ModelConfig, *, shared_expert: str | None = None) -> dict[str, Any]:
    """Writes the keys that `read_sparse_layers` reads."""

    def moe_keys(moe: MoEConfig) -> dict[str, Any]:
        shared = {} if shared_expert is None else {shared_expert: moe.universal_ffn.dim}
        return usual.write_moe(moe) | shared

    # The largest step that passes every MoE; without any, all layers are listed as dense.
    step = math.gcd(*(i + 1 for i in config.moe_layers)) or 1
    dense = [i for i in range(step - 1, config.num_layers, step) if i not in config.moe_layers]
    return {"decoder_sparse_step": step, "mlp_only_layers": dense, **usual.write_mixed(config, moe_keys)}


# --- Qwen2: biases on queries, keys and values; optionally a window on some layers ----------------


def _read_dense(config: HFConfig, family: str, **kwargs: Any) -> ModelConfig:
    """Reads a model of dense layers; further keywords are for the attention of all."""
    ffn = usual.read_gated_ffn(config)
    layers = [
        LayerConfig(attention=usual.read_attention(config, **kwargs, sliding_window=window), mlp=ffn)
        for window in _read_windows(config)
    ]
    return usual.read_decoder(config, family, layers)


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    classifier=SCORE,
    defaults={**_DEFAULTS, "num_key_value_heads": 32, "max_window_layers": 28},
    read=lambda config: _read_dense(config, "qwen2", biases=("q", "k", "v")),
    write=lambda config: usual.write_dense(config) | _write_windows(config),
    table=(*usual.EMBEDDING, *usual.ATTENTION, *usual.GATED_FFN, *usual.HEAD),
    moe_formats=("qwen2_moe",),
)

# --- Qwen3: q/k norm per head, heads of a width of their own; optionally a window on some layers --


def _read_qwen3(config: HFConfig) -> ModelConfig:
    config.require("head_dim")
    return _read_dense(config, "qwen3", biases=usual.read_biases(config), qk_norm="head")


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    classifier=SCORE,
    defaults={**QWEN2.defaults, "head_dim": 128, "attention_bias": False},
    read=_read_qwen3,
    write=lambda config: usual.write_dense(config) | usual.write_biases(config) | _write_windows(config),
    table=QWEN2.table,
    moe_formats=("qwen3_moe",),
)

# --- Qwen2-MoE: Qwen2 with a shared expert, weighted by the sigmoid of a linear map ---------------

SHARED_EXPERT = "shared_expert_intermediate_size"


def _read_qwen2_moe(config: HFConfig) -> ModelConfig:
    biases = usual.read_biases(config, "qkv_bias", ("q", "k", "v"))
    # Unlike in Qwen2, windows are in every second layer, and below `max_window_layers`.
    windows = _read_windows(config, slides=lambda i, limit: i % 2 == 0 and i < limit)
    attention = [usual.read_attention(config, biases=biases, sliding_window=window) for window in windows]
    return usual.read_decoder(config, "qwen2_moe", read_sparse_layers(config, attention, shared_expert=SHARED_EXPERT))


def _write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        **usual.write_decoder(config),
        **usual.write_biases(config, "qkv_bias", "q/k/v bias"),
        **_write_windows(config),
        **write_sparse_layers(config, shared_expert=SHARED_EXPERT),
    }


QWEN2_MOE = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    classifier=SCORE,
    defaults={
        **_MOE_DEFAULTS,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "qkv_bias": True,
        "max_window_layers": 28,
        "moe_intermediate_size": 1408,
        SHARED_EXPERT: 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
    read=_read_qwen2_moe,
    write=_write_qwen2_moe,
    balance_over="model",
    table=(
        *usual.EMBEDDING,
        *usual.ATTENTION,
        *usual.ROUTER,
        *linear("model.layers.{i}.mlp.shared_expert_gate", "layers/{i}/mlp/router/universal"),
        *usual.gated_ffn("model.layers.{i}.mlp.shared_expert", "layers/{i}/mlp/universal"),
        *usual.gated_experts(),
        *usual.GATED_FFN,
        *usual.HEAD,
    ),
    universal="sigmoid",
)

# --- Qwen3-MoE: Qwen3 with MoEs in all layers, or in every n-th except for some listed ones -------


def _read_qwen3_moe(config: HFConfig) -> ModelConfig:
    # Unlike in Qwen3, all layers have the window: `max_window_layers` and `layer_types` have no effect.
    window = config.integer("sliding_window") if config.flag("use_sliding_window") else None
    attention = usual.read_attention(config, biases=usual.read_biases(config), qk_norm="head", sliding_window=window)
    return usual.read_decoder(config, "qwen3_moe", read_sparse_layers(config, [attention] * usual.num_layers(config)))


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    window = write_window(config)["sliding_window"]
    return {
        **usual.write_decoder(config),
        **usual.write_biases(config),
        "use_sliding_window": window is not None,
        **({} if window is None else {"sliding_window": window}),
        **write_sparse_layers(config),
    }


QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    classifier=SCORE,
    defaults={
        **_MOE_DEFAULTS,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    harmless=("max_window_layers", "layer_types"),  # see `_read_qwen3_moe`
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
    balance_over="model",
    table=(*usual.EMBEDDING, *usual.ATTENTION, *usual.ROUTER, *usual.gated_experts(), *usual.GATED_FFN, *usual.HEAD),
)
