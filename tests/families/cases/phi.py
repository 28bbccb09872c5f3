CONFIG, MODEL = "PhiConfig", "PhiForCausalLM"
CASES = {
    "phi": dict(num_key_value_heads=4),
    "phi-grouped-tied": dict(tie_word_embeddings=True, layer_norm_eps=0.1),
    # As in Phi-2, 0.4 of a head is rotated.
    "phi-wide-heads": dict(
        head_dim=20, num_key_value_heads=1, rope_parameters=dict(rope_theta=50.0, partial_rotary_factor=0.4)
    ),
    "phi-whole-rotation-gelu": dict(
        hidden_act="gelu",
        rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4, partial_rotary_factor=1.0),
    ),
    "phi-dynamic-rope": dict(
        max_position_embeddings=24, rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    ),
}
