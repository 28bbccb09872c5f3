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
}
