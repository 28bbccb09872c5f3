CONFIG, MODEL = "Olmo3Config", "Olmo3ForCausalLM"
_YARN = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=8, attention_factor=1.25)
CASES = {
    "olmo3": dict(
        num_hidden_layers=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(full_attention=_YARN, sliding_attention=dict(rope_type="default", rope_theta=1e4)),
    ),
    "olmo3-every-fourth-biases": dict(num_hidden_layers=5, sliding_window=8, attention_bias=True),
    "olmo3-no-window-tied": dict(sliding_window=64, layer_types=["full_attention"] * 3, tie_word_embeddings=True),
    "olmo3-one-kv-head-all-windows": dict(
        num_key_value_heads=1, num_hidden_layers=2, sliding_window=5, layer_types=["sliding_attention"] * 2
    ),
}
