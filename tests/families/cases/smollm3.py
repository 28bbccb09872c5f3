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
}
