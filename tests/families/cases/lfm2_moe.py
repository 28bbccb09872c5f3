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
}
