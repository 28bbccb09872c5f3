from tests.families.cases.glm4_moe import SMALL_MOE

CONFIG, MODEL = "Dots1Config", "Dots1ForCausalLM"
CASES = {
    "dots1": dict(SMALL_MOE, attention_bias=True, norm_topk_prob=True, sliding_window=8, max_window_layers=1),
    "dots1-no-window": dict(SMALL_MOE, sliding_window=None, routed_scaling_factor=2.5, n_group=2, topk_group=1),
    "dots1-types-tied": dict(
        SMALL_MOE,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=True,
        n_shared_experts=2,
        first_k_dense_replace=0,
    ),
    "dots1-one-kv-head-dense-first": dict(
        SMALL_MOE, num_hidden_layers=4, num_key_value_heads=1, first_k_dense_replace=3, norm_topk_prob=True
    ),
}
