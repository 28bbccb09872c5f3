CONFIG, MODEL = "Glm4Config", "Glm4ForCausalLM"
CASES = {
    "glm4": dict(num_hidden_layers=2, head_dim=12),
    "glm4-no-biases-whole-heads-tied": dict(
        head_dim=8,
        attention_bias=False,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0),
        tie_word_embeddings=True,
        rms_norm_eps=1e-2,
    ),
    "glm4-one-kv-head-one-layer": dict(num_hidden_layers=1, num_key_value_heads=1, head_dim=16),
    "glm4-mha-quarter-rotated": dict(
        num_key_value_heads=4,
        head_dim=8,
        attention_bias=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e3, partial_rotary_factor=0.25),
    ),
}
