CONFIG, MODEL = "ExaoneMoeConfig", "ExaoneMoeForCausalLM"
_MOE = dict(moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, sliding_window=8)
CASES = {
    "exaone_moe": dict(_MOE, sliding_window_pattern=2, n_group=4, topk_group=2),
    "exaone_moe-listed-tied": dict(
        _MOE,
        head_dim=12,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"],
        tie_word_embeddings=True,
        num_shared_experts=2,
        norm_topk_prob=False,
    ),
    "exaone_moe-one-kv-head-dense-first": dict(
        _MOE, num_hidden_layers=5, num_key_value_heads=1, first_k_dense_replace=2, num_experts_per_tok=1
    ),
    "exaone_moe-mha-no-window-scaled": dict(
        _MOE, num_key_value_heads=4, layer_types=["full_attention"] * 3, routed_scaling_factor=0.5
    ),
}
