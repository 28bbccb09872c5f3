CONFIG, MODEL = "HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM"
CASES = {
    "hunyuan_v1_moe": dict(num_hidden_layers=2, num_experts=4, moe_topk=2, head_dim=12),
    "hunyuan_v1_moe-alpha-biases-tied": dict(
        num_experts=6,
        moe_topk=3,
        head_dim=8,
        attention_bias=True,
        tie_word_embeddings=True,
        num_key_value_heads=4,
        rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, alpha=50.0, factor=1.0),
    ),
    "hunyuan_v1_moe-one-expert-one-kv-head": dict(
        num_hidden_layers=2, num_experts=5, moe_topk=1, head_dim=16, num_key_value_heads=1
    ),
    "hunyuan_v1_moe-all-experts-one-layer": dict(
        num_hidden_layers=1, num_experts=3, moe_topk=3, head_dim=8, attention_bias=True, rms_norm_eps=1e-3
    ),
}
