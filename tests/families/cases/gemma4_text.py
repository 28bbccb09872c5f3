CONFIG, MODEL = "Gemma4TextConfig", "Gemma4ForCausalLM"
_SAME = dict(
    head_dim=12,
    global_head_dim=16,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"],
    num_hidden_layers=2,
    hidden_size_per_layer_input=0,
    final_logit_softcapping=3.0,
)
_ROPE = dict(
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
    full_attention=dict(rope_type="proportional", rope_theta=1e4, partial_rotary_factor=0.5, factor=2.0),
)
CASES = {
    "gemma4_text": dict(
        _SAME, enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=24, rope_parameters=_ROPE
    ),
    "gemma4_text-dense": dict(_SAME, num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"]),
    "gemma4_text-own-values-biases-untied": dict(
        _SAME,
        attention_k_eq_v=False,
        attention_bias=True,
        tie_word_embeddings=False,
        final_logit_softcapping=None,
        layer_types=["full_attention"] * 2,
        rope_parameters=_ROPE,
    ),
    "gemma4_text-one-kv-head-one-expert-full": dict(
        _SAME,
        num_key_value_heads=1,
        layer_types=["full_attention", "full_attention"],
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=1,
        moe_intermediate_size=20,
        sliding_window=5,
    ),
}
