CONFIG, MODEL = "OlmoeConfig", "OlmoeForCausalLM"
CASES = {
    "olmoe": dict(num_experts=16, num_experts_per_tok=8, norm_topk_prob=False, clip_qkv=0.5),
    "olmoe-normalised": dict(num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
    "olmoe-tied-one-kv-head": dict(
        num_experts=8, num_experts_per_tok=2, norm_topk_prob=False, tie_word_embeddings=True, num_key_value_heads=1
    ),
    "olmoe-mha-linear-rope": dict(
        num_experts=5,
        num_experts_per_tok=1,
        norm_topk_prob=False,
        num_key_value_heads=4,
        rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4),
    ),
}
