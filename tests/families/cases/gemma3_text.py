CONFIG, MODEL = "Gemma3TextConfig", "Gemma3ForCausalLM"
CASES = {
    "gemma3_text": dict(
        head_dim=12,
        sliding_window=4,
        sliding_window_pattern=2,
        query_pre_attn_scalar=10,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e4),
            sliding_attention=dict(rope_type="default", rope_theta=100.0),
        ),
    ),
    "gemma3_text-six-layers-a-pattern": dict(head_dim=16, num_hidden_layers=7, sliding_window=8),
    "gemma3_text-cap-untied": dict(
        head_dim=8, num_key_value_heads=4, sliding_window=8, final_logit_softcapping=2.0, tie_word_embeddings=False
    ),
    "gemma3_text-layer-types-biases": dict(
        head_dim=24,
        num_key_value_heads=1,
        sliding_window=8,
        attention_bias=True,
        rms_norm_eps=1e-2,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
}
