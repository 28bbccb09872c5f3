CONFIG, MODEL = "GptOssConfig", "GptOssForCausalLM"
_MOE = dict(head_dim=12, num_local_experts=8, num_experts_per_tok=3, sliding_window=8)
CASES = {
    "gpt_oss": dict(
        _MOE,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=16, truncate=False
        ),
    ),
    "gpt_oss-published-rope-no-biases": dict(_MOE, num_key_value_heads=4, attention_bias=False),
    "gpt_oss-plain-rope-tied": dict(
        _MOE,
        num_experts_per_tok=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=1e3),
    ),
    "gpt_oss-no-window-all-experts": dict(
        _MOE, num_experts_per_tok=8, num_hidden_layers=2, layer_types=["full_attention"] * 2, head_dim=8
    ),
}
