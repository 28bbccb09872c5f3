"""Configs in small of the families of which some layers have a recurrence in the place of attention."""

from typing import Any

_DELTA_RULE = {
    "num_hidden_layers": 2,
    "head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}

_ROPE = {
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}

_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}

# Keys beside those of `hf_checkpoints.BASE`; None where a family has no such key.
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_DELTA_RULE,
        **_EXPERTS,
        "model_type": "qwen3_next",
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    "qwen3_5_text": {**_DELTA_RULE, **_ROPE, "model_type": "qwen3_5_text"},
    "qwen3_5_moe_text": {
        **_DELTA_RULE,
        **_ROPE,
        **_EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "intermediate_size": None,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "ME*-",
        "rms_norm_eps": None,
        "layer_norm_epsilon": 1e-5,
        "hidden_act": None,
        "head_dim": 12,
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "ssm_state_size": 8,
        "n_groups": 2,
        "conv_kernel": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 20,
    },
}
