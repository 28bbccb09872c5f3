"""Configs in small of the families that route as DeepSeek-V3 does, and of those that came with them."""

from typing import Any

_EXPERTS = {
    "num_hidden_layers": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
}

_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}

_GRANITE = {
    "num_hidden_layers": 2,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 7.0,
}

_ALL_SPARSE = {key: value for key, value in _EXPERTS.items() if key != "first_k_dense_replace"}


def _renamed(keys: dict[str, Any], **names: str) -> dict[str, Any]:
    """The keys by other names; those with an empty one are left out."""
    return {names.get(key, key): value for key, value in keys.items() if names.get(key, key)}


_COHERE = {
    "num_hidden_layers": 2,
    "rms_norm_eps": None,
    "layer_norm_eps": 1e-5,
    "sliding_window": 8,
    "logit_scale": 0.5,
    "tie_word_embeddings": True,
}

_INDEXED = {
    **_LATENT,
    "index_n_heads": 8,
    "index_head_dim": 6,
    "index_topk": 5,
    "mlp_layer_types": ["dense", "sparse"],
}

_SHORT_CONVOLUTIONS = {
    "num_hidden_layers": 2,
    "rms_norm_eps": None,
    "norm_eps": 1e-5,
    "hidden_act": None,
    "layer_types": ["conv", "full_attention"],
}

# Keys beside those of `hf_checkpoints.BASE`; None where a family has no such key.
NEWER: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        **_EXPERTS,
        "model_type": "glm4_moe",
        "head_dim": 12,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 0,
    },
    "dots1": {
        **_EXPERTS,
        "model_type": "dots1",
        "n_shared_experts": 2,
        "attention_bias": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": 24,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 1,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "num_hidden_layers": 2,
        "head_dim": 12,
        "rotary_dim": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "kimi_k2": {
        **_LATENT,
        "model_type": "kimi_k2",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "num_nextn_predict_layers": 0,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "truncate": True,
        },
    },
    "granite": {**_GRANITE, "model_type": "granite", "attention_bias": True, "mlp_bias": True},
    "granite-plain": {**_GRANITE, "model_type": "granite", "tie_word_embeddings": True},
    "granitemoe": {**_GRANITE, "model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {
        **_GRANITE,
        "model_type": "granitemoeshared",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 20,
        "tie_word_embeddings": True,
    },
    "olmo2": {"model_type": "olmo2", "attention_bias": True},
    "olmo3": {
        "model_type": "olmo3",
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 8,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 1.25,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,
        },
    },
    "flex_olmo": {"model_type": "flex_olmo", "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 3},
    "solar_open": {**_ALL_SPARSE, "model_type": "solar_open", "head_dim": 12, "attention_bias": True},
    "exaone_moe": {
        **_renamed(_EXPERTS, n_routed_experts="num_experts", n_shared_experts="num_shared_experts"),
        "model_type": "exaone_moe",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "sliding_window": 8,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe_lite": {
        **_renamed(_LATENT, first_k_dense_replace=""),
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["dense", "sparse"],
        "num_nextn_predict_layers": 0,
    },
    "phi3": {
        "model_type": "phi3",
        "partial_rotary_factor": 0.5,
        "sliding_window": 8,
        "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]},
    },
    "phi3-plain": {"model_type": "phi3"},
    "smollm3": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "glm4": {
        "model_type": "glm4",
        "num_hidden_layers": 2,
        "head_dim": 12,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "hunyuan_v1_moe": {
        "model_type": "hunyuan_v1_moe",
        "num_hidden_layers": 2,
        "head_dim": 12,
        "num_experts": 4,
        "moe_topk": 2,
        "attention_bias": True,
    },
    "cohere2": {
        **_COHERE,
        "model_type": "cohere2",
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cohere2_moe": {
        **_COHERE,
        "model_type": "cohere2_moe",
        "head_dim": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": True,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "prefix_dense_sliding_window_pattern": 1,
        "prefix_dense_intermediate_size": 40,
    },
    "phimoe": {
        "model_type": "phimoe",
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
        "original_max_position_embeddings": 32,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "short_mscale": 1.25,
            "long_mscale": 1.25,
            "original_max_position_embeddings": 32,
            "factor": 4.0,
        },
    },
    "afmoe": {
        "model_type": "afmoe",
        "num_hidden_layers": 2,
        "head_dim": 12,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "route_scale": 2.5,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "mup_enabled": True,
    },
    "lfm2": {
        **_SHORT_CONVOLUTIONS,
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        **_SHORT_CONVOLUTIONS,
        "model_type": "lfm2_moe",
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "tie_word_embeddings": False,
    },
    "deepseek_v32": {
        **_INDEXED,
        "model_type": "deepseek_v32",
        "num_nextn_predict_layers": 0,
    },
    "glm_moe_dsa": {
        **_INDEXED,
        "model_type": "glm_moe_dsa",
        "indexer_types": ["full", "shared"],
        "num_nextn_predict_layers": 0,
    },
}
