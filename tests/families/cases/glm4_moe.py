CONFIG, MODEL = "Glm4MoeConfig", "Glm4MoeForCausalLM"
SMALL_MOE = dict(
    num_hidden_layers=2,
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
CASES = {
    "glm4_moe": dict(
        **SMALL_MOE, head_dim=12, use_qk_norm=True, attention_bias=True, n_group=4, topk_group=2, num_mtp_layers=0
    ),
    "glm4_moe-not-normalised": dict(SMALL_MOE, norm_topk_prob=False, routed_scaling_factor=2.5, n_shared_experts=2),
    "glm4_moe-whole-heads-tied": dict(
        SMALL_MOE,
        first_k_dense_replace=0,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=1.0),
        tie_word_embeddings=True,
        num_key_value_heads=1,
    ),
    "glm4_moe-all-dense": dict(SMALL_MOE, first_k_dense_replace=2, num_key_value_heads=4),
}
