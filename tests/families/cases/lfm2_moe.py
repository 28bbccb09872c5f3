CONFIG, MODEL = "Lfm2MoeConfig", "Lfm2MoeForCausalLM"
_MOE = dict(
    num_hidden_layers=2,
    layer_types=["conv", "full_attention"],
    moe_intermediate_size=24,
    num_experts=8,
    num_experts_per_tok=3,
    num_dense_layers=1,
)
CASES = {
    "lfm2_moe": dict(_MOE, routed_scaling_factor=1.5),
    "lfm2_moe-all-experts-no-bias-untied": dict(
        _MOE,
        num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        num_dense_layers=0,
        norm_topk_prob=False,
        use_expert_bias=False,
        conv_L_cache=2,
        tie_word_embeddings=False,
    ),
    "lfm2_moe-one-expert-one-kv-head": dict(
        _MOE, num_experts=5, num_experts_per_tok=1, num_key_value_heads=1, conv_bias=True, conv_L_cache=4
    ),
    "lfm2_moe-all-attention-mha": dict(
        _MOE,
        num_hidden_layers=3,
        layer_types=["full_attention"] * 3,
        num_dense_layers=2,
        num_key_value_heads=4,
        routed_scaling_factor=0.5,
    ),
}
