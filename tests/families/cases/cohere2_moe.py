CONFIG, MODEL = "Cohere2MoeConfig", "Cohere2MoeForCausalLM"
_MOE = dict(head_dim=12, sliding_window=8, num_experts=6, num_experts_per_tok=3, logit_scale=0.5)
CASES = {
    "cohere2_moe": dict(_MOE, first_k_dense_replace=1, sliding_window_pattern=2, prefix_dense_intermediate_size=40),
    "cohere2_moe-sigmoid-shared": dict(
        _MOE,
        num_hidden_layers=2,
        expert_selection_fn="sigmoid",
        norm_topk_prob=False,
        num_shared_experts=2,
        shared_expert_combination_strategy="sum",
        layer_types=["full_attention", "sliding_attention"],
        tie_word_embeddings=False,
    ),
    "cohere2_moe-rms-sigmoid-normalised": dict(
        _MOE,
        num_hidden_layers=2,
        expert_selection_fn="sigmoid",
        rms_norm_eps=1e-5,
        mlp_layer_types=["sparse", "dense"],
        layer_types=["sliding_attention", "full_attention"],
        prefix_dense_sliding_window_pattern=2,
        attention_bias=True,
    ),
    "cohere2_moe-one-expert-one-kv-head": dict(
        _MOE, num_experts_per_tok=1, num_key_value_heads=1, first_k_dense_replace=2, sliding_window_pattern=3
    ),
}
