CONFIG, MODEL = "PhimoeConfig", "PhimoeForCausalLM"
CASES = {
    "phimoe": dict(num_hidden_layers=2, num_local_experts=16, attention_bias=True, lm_head_bias=True),
    "phimoe-longrope-window": dict(
        num_local_experts=5,
        sliding_window=8,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=1e4,
            short_factor=[1.0, 1.5, 1.2, 1.0],
            long_factor=[2.0, 3.0, 2.0, 1.0],
            short_mscale=1.25,
            long_mscale=1.25,
            original_max_position_embeddings=48,
        ),
    ),
    "phimoe-tied": dict(num_local_experts=4, tie_word_embeddings=True, num_key_value_heads=4),
    "phimoe-two-experts-one-kv-head": dict(
        num_hidden_layers=2, num_local_experts=2, num_key_value_heads=1, lm_head_bias=True, sliding_window=5
    ),
}
