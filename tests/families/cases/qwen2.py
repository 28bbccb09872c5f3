CONFIG, MODEL = "Qwen2Config", "Qwen2ForCausalLM"
CASES = {
    "qwen2": dict(tie_word_embeddings=True),
    "qwen2-window": dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen2-mha-linear-rope": dict(
        num_key_value_heads=4, rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e6)
    ),
    "qwen2-layer-types": dict(
        num_key_value_heads=1,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
