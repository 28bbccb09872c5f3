CONFIG, MODEL = "SmolLM3Config", "SmolLM3ForCausalLM"
CASES = {
    "smollm3": dict(no_rope_layer_interval=2, num_hidden_layers=2),
    "smollm3-biases-windows-untied": dict(
        no_rope_layers=[0, 1, 1],
        attention_bias=True,
        mlp_bias=True,
        use_sliding_window=True,
        sliding_window=8,
        tie_word_embeddings=False,
    ),
    "smollm3-types": dict(
        no_rope_layers=[1, 1, 0],
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        num_key_value_heads=4,
    ),
    "smollm3-one-kv-head-yarn": dict(
        no_rope_layers=[1, 0],
        num_hidden_layers=2,
        num_key_value_heads=1,
        rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=16),
    ),
}
