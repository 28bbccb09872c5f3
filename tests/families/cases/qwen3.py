CONFIG, MODEL = "Qwen3Config", "Qwen3ForCausalLM"
CASES = {
    "qwen3": dict(head_dim=16),
    "qwen3-tied-mha": dict(head_dim=8, num_key_value_heads=4, tie_word_embeddings=True),
    "qwen3-biases-window": dict(
        head_dim=12, attention_bias=True, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3-yarn-rope-one-kv-head": dict(
        head_dim=24,
        num_key_value_heads=1,
        rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e6, original_max_position_embeddings=16),
    ),
    "qwen3-layer-types": dict(
        head_dim=16,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
