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

# Keys beside those of `hf_checkpoints.BASE`.
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
}
