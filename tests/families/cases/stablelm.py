CONFIG, MODEL = "StableLmConfig", "StableLmForCausalLM"
CASES = {
    "stablelm": {},
    "stablelm-biases-mha": dict(use_qkv_bias=True, num_key_value_heads=4, tie_word_embeddings=True),
    "stablelm-parallel-head-norms": dict(use_parallel_residual=True, qk_layernorm=True),
    "stablelm-head-norms-half-rotated": dict(
        qk_layernorm=True, use_qkv_bias=True, num_key_value_heads=1, partial_rotary_factor=0.5, layer_norm_eps=1e-2
    ),
    "stablelm-whole-heads-gelu": dict(partial_rotary_factor=1.0, use_parallel_residual=True, hidden_act="gelu"),
    "stablelm-yarn-rope": dict(
        rope_parameters=dict(
            rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=16, partial_rotary_factor=0.5
        )
    ),
}
