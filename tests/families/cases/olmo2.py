CONFIG, MODEL = "Olmo2Config", "Olmo2ForCausalLM"
CASES = {
    "olmo2": dict(num_hidden_layers=2),
    "olmo2-biases-tied": dict(attention_bias=True, tie_word_embeddings=True, num_key_value_heads=4, head_dim=12),
    "olmo2-linear-rope": dict(
        num_key_value_heads=1, rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)
    ),
    "olmo2-yarn-one-layer": dict(
        num_hidden_layers=1,
        rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=16),
    ),
}
