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

# Keys beside those of `hf_checkpoints.BASE`; None in place of a key of these that the family has not.
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
}
