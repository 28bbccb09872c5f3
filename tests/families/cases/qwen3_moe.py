CONFIG, MODEL = "Qwen3MoeConfig", "Qwen3MoeForCausalLM"
CASES = {
    "qwen3_moe": dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
    "qwen3_moe-biases-not-normalised": dict(
        num_experts=16,
        num_experts_per_tok=8,
        moe_intermediate_size=12,
        norm_topk_prob=False,
        attention_bias=True,
        num_key_value_heads=1,
    ),
    "qwen3_moe-every-second-tied": dict(
        head_dim=12,
        num_hidden_layers=4,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        tie_word_embeddings=True,
        num_key_value_heads=4,
    ),
    "qwen3_moe-first-dense-window": dict(
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=24,
        norm_topk_prob=False,
        mlp_only_layers=[0],
        use_sliding_window=True,
        sliding_window=8,
    ),
}
