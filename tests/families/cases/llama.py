CONFIG, MODEL = "LlamaConfig", "LlamaForCausalLM"
CASES = {
    "llama": {},
    "llama-tied-mha": dict(num_key_value_heads=4, tie_word_embeddings=True),
    "llama-biases-wide-heads": dict(attention_bias=True, mlp_bias=True, head_dim=16, num_key_value_heads=1),
    "llama-gelu": dict(hidden_act="gelu"),
    "llama-linear-rope": dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    "llama-dynamic-rope": dict(
        rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4), max_position_embeddings=24
    ),
    "llama-yarn-rope": dict(
        rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=16)
    ),
    "llama-yarn-mscale-rope": dict(
        rope_parameters=dict(
            rope_type="yarn",
            factor=4.0,
            rope_theta=1e4,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=0.7,
            beta_fast=16.0,
            beta_slow=2.0,
        )
    ),
    "llama-llama3-rope": dict(
        rope_parameters=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
            rope_theta=1e4,
        )
    ),
    "llama-longrope": dict(
        rope_parameters=dict(
            rope_type="longrope",
            factor=4.0,
            rope_theta=1e4,
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[2.0, 2.5, 3.0, 4.0],
            original_max_position_embeddings=16,
        )
    ),
}
