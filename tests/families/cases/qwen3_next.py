CONFIG, MODEL = "Qwen3NextConfig", "Qwen3NextForCausalLM"
ZERO_CENTRED = ("layernorm", "q_norm", "k_norm", "model.norm")
_MOE = dict(
    rms_norm_eps=1e-3,  # a head that reads next to nothing would be rounding, made large by its norm
    head_dim=16,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=20,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
)
CASES = {
    "qwen3_next": _MOE,
    "qwen3_next-biases-dense-layer-tied": dict(
        _MOE,
        attention_bias=True,
        linear_num_key_heads=4,
        num_hidden_layers=5,
        layer_types=None,
        mlp_only_layers=[1],
        norm_topk_prob=False,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e3, partial_rotary_factor=0.5),
    ),
    "qwen3_next-one-kv-head-one-expert": dict(
        _MOE, num_key_value_heads=1, num_experts=5, num_experts_per_tok=1, linear_conv_kernel_dim=2
    ),
    "qwen3_next-every-second-dense": dict(
        _MOE,
        num_key_value_heads=4,
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        decoder_sparse_step=2,
        linear_num_key_heads=1,
    ),
}
