CONFIG, MODEL = "Phi3Config", "Phi3ForCausalLM"
_LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.5], long_factor=[2.0, 3.0])
CASES = {
    "phi3": dict(num_hidden_layers=2, sliding_window=8),
    "phi3-longrope-partial-tied": dict(
        rope_parameters=dict(**_LONGROPE, partial_rotary_factor=0.5),
        original_max_position_embeddings=24,
        tie_word_embeddings=True,
    ),
    "phi3-mha-half-rotated": dict(
        num_key_value_heads=4,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75),
    ),
    "phi3-one-kv-head-one-layer": dict(num_hidden_layers=1, num_key_value_heads=1, sliding_window=5, rms_norm_eps=1e-3),
}
