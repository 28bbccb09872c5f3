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
}
