CONFIG, MODEL = "DeepseekV2Config", "DeepseekV2ForCausalLM"
LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=12,
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=40.0, original_max_position_embeddings=16)
CASES = {
    "deepseek_v2": dict(
        **LATENT,
        q_lora_rank=20,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=16.0,
        rope_parameters=dict(**YARN, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek_v2-lite": dict(**LATENT, q_lora_rank=None),
    "deepseek_v2-biases-no-dense-layer": {
        **LATENT,
        "q_lora_rank": 20,
        "attention_bias": True,
        "first_k_dense_replace": 0,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-3,
        "rope_parameters": dict(**YARN, mscale=1.0, mscale_all_dim=0.5),
    },
    "deepseek_v2-two-dense-layers-tied": {
        **LATENT,
        "q_lora_rank": None,
        "attention_bias": True,
        "first_k_dense_replace": 2,
        "num_experts_per_tok": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
        "tie_word_embeddings": True,
        "rope_parameters": YARN,
    },
    "deepseek_v2-linear-rope-narrow-values": {
        **LATENT,
        "v_head_dim": 4,
        "qk_rope_head_dim": 12,
        "rope_parameters": dict(rope_type="linear", factor=4.0, rope_theta=1e4),
    },
}
