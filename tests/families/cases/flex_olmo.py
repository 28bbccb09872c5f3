CONFIG, MODEL = "FlexOlmoConfig", "FlexOlmoForCausalLM"
CASES = {
    "flex_olmo": dict(num_hidden_layers=2, num_experts=6, num_experts_per_tok=3),
    "flex_olmo-normalised-biases": dict(
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, attention_bias=True, num_key_value_heads=4
    ),
    "flex_olmo-one-expert-tied": dict(num_experts=4, num_experts_per_tok=1, head_dim=12, tie_word_embeddings=True),
    "flex_olmo-one-kv-head-linear-rope": dict(
        num_experts=5,
        num_experts_per_tok=4,
        num_key_value_heads=1,
        rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4),
    ),
}
