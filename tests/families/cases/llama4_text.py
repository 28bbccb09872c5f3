CONFIG, MODEL = "Llama4TextConfig", "Llama4ForCausalLM"
_SAME = dict(
    num_hidden_layers=4,
    head_dim=12,
    intermediate_size_mlp=40,
    num_local_experts=4,
    attention_chunk_size=8,
    floor_scale=8,
    attn_scale=0.5,
)
CASES = {
    # As Scout: every layer is an MoE, and a scaling between whose two lengths lies nothing.
    "llama4_text": {
        **_SAME,
        "num_hidden_layers": 2,
        "no_rope_layers": [1, 0],
        "rope_parameters": dict(
            rope_type="llama3",
            rope_theta=1e4,
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
            original_max_position_embeddings=16,
        ),
    },
    # As Maverick: every second layer is an MoE, and queries and keys have no norm.
    "llama4_text-no-norm-every-second": dict(
        _SAME, interleave_moe_layer_step=2, use_qk_norm=False, attn_temperature_tuning=False
    ),
    "llama4_text-two-experts-full-biases-tied": dict(
        _SAME,
        num_experts_per_tok=2,
        moe_layers=[1, 2],
        no_rope_layers=[1, 0, 0, 1],
        layer_types=["full_attention", "chunked_attention", "full_attention", "chunked_attention"],
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "llama4_text-one-kv-head-dense": dict(
        _SAME, num_hidden_layers=2, moe_layers=[], num_key_value_heads=1, no_rope_layers=[1, 1], attention_chunk_size=5
    ),
}
