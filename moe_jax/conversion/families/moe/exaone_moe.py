"""K-EXAONE: q/k norms per head, windows on most layers, which alone rotate, and DeepSeek-V3's choice of experts."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.moe.usual_moe import (
    SHARED_EXPERTS,
    above_dense,
    check_further,
    listed_as_sparse,
    read_balanced,
    read_moe_layers,
    renamed,
    selection_bias,
    write_balanced,
    write_first_dense,
    write_moe_layers,
    write_sparse,
)
from moe_jax.conversion.families.windows import UNROTATED, read_windows, slides_but_every, write_layer_types
from moe_jax.conversion.table import FUSED, PER_EXPERT, Ignored
from moe_jax.models import ModelConfig

# How the family calls the keys that `usual_moe` reads and writes.
_NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def _read(config: HFConfig) -> ModelConfig:
    config.must_be("scoring_func", "sigmoid")
    config.must_be("topk_method", "noaux_tc")
    check_further(config)
    # The pattern may be a word, and then there are types.
    slides = (lambda i: False) if config.given("layer_types") else slides_but_every(config, "sliding_window_pattern")
    windows = read_windows(config, slides=slides)
    rotates_all = config.integer("sliding_window") is None
    attention = [
        usual.read_attention(
            config,
            qk_norm="head",
            sliding_window=window,
            rope=UNROTATED if window is None and not rotates_all else None,
        )
        for window in windows
    ]
    moes = listed_as_sparse(config)
    moes = above_dense(config) if moes is None else moes
    layers = read_moe_layers(config, attention, moes, balance_coef=0.0, **read_balanced(config))
    return usual.read_decoder(config, "exaone_moe", layers)


def _write(config: ModelConfig) -> dict[str, Any]:
    rotates_all = all(layer.softmax_attention.rope is None for layer in config.layers)
    types = write_layer_types(config)
    return {
        **usual.write_decoder(config),
        # A window that no layer has says that those without one rotate nothing.
        "sliding_window": None if rotates_all else config.max_positions,
        **types,
        **write_first_dense(config),
        **write_sparse(config),
        **renamed(write_moe_layers(config) | write_balanced(config), _NAMES),
        "num_nextn_predict_layers": 0,
    }


EXAONE_MOE = Family(
    name="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    names=_NAMES,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "intermediate_size": 16384,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "bos_token_id": 1,
        "eos_token_id": 53,
    },
    read=_read,
    write=_write,
    table=(
        *usual.EMBEDDING,
        *usual.ATTENTION,
        *usual.ROUTER,
        *selection_bias({PER_EXPERT: "mlp.e_score_correction_bias", FUSED: "mlp.gate.e_score_correction_bias"}),
        *usual.gated_experts(),
        *SHARED_EXPERTS,
        *usual.GATED_FFN,
        *usual.HEAD,
        Ignored(r"mtp\..*", "of layers that predict tokens after the next, which are no part of the decoder"),
    ),
)
