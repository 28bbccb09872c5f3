CONFIG, MODEL = "Qwen3_5TextConfig", "Qwen3_5ForCausalLM"
ZERO_CENTRED = ("layernorm", "q_norm", "k_norm", "model.norm")
_RULE = dict(
    rms_norm_eps=1e-3,  # a head that reads next to nothing would be rounding, made large by its norm
    head_dim=16,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    rope_parameters=dict(
        rope_type="default",
        rope_theta=1e4,
        partial_rotary_factor=0.25,
        mrope_section=[1, 1, 0],
        mrope_interleaved=True,
    ),
)
CASES = {
    "qwen3_5_text": _RULE,
    "qwen3_5_text-short-convolution-tied": dict(
        _RULE, num_hidden_layers=4, layer_types=["full_attention"] + ["linear_attention"] * 3,
        linear_conv_kernel_dim=2, linear_num_key_heads=1, tie_word_embeddings=True,
    ),
    "qwen3_5_text-one-kv-head-as-many-keys-as-values": dict(
        _RULE, num_key_value_heads=1, linear_num_key_heads=4, linear_value_head_dim=8, attention_bias=True
    ),
    "qwen3_5_text-mha-half-rotated": dict(
        _RULE,
        num_key_value_heads=4,
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "full_attention"],
        linear_conv_kernel_dim=3,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=1e3,
            partial_rotary_factor=0.5,
            mrope_section=[2, 1, 1],
            mrope_interleaved=True,
        ),
    ),
}  # fmt: skip
