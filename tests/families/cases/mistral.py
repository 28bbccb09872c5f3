CONFIG, MODEL = "MistralConfig", "MistralForCausalLM"
CASES = {
    "mistral-window": dict(sliding_window=8),
    "mistral": dict(sliding_window=None, head_dim=12),
    "mistral-tied-one-kv-head": dict(sliding_window=4096, num_key_value_heads=1, tie_word_embeddings=True),
    "mistral-mha-yarn-rope": dict(
        sliding_window=16,
        num_key_value_heads=4,
        rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e6, original_max_position_embeddings=16),
    ),
}
