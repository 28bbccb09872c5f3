CONFIG, MODEL = "AfmoeConfig", "AfmoeForCausalLM"
_MOE = dict(head_dim=12, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, sliding_window=8)
CASES = {
    "afmoe": dict(_MOE, num_hidden_layers=2, global_attn_every_n_layers=2, route_scale=2.5, mup_enabled=True),
    "afmoe-biases-tied": dict(
        _MOE,
        num_dense_layers=0,
        num_shared_experts=1,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        attention_bias=True,
        tie_word_embeddings=True,
        num_key_value_heads=4,
    ),
    "afmoe-one-kv-head-two-dense": dict(
        _MOE, num_key_value_heads=1, num_hidden_layers=5, num_dense_layers=2, head_dim=8, num_experts_per_tok=1
    ),
    "afmoe-two-shared-no-window": dict(
        _MOE, num_shared_experts=2, num_dense_layers=1, layer_types=["full_attention"] * 3, route_scale=0.5
    ),
}
