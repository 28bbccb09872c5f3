from tests.families.cases.glm4_moe import SMALL_MOE

CONFIG, MODEL = "SolarOpenConfig", "SolarOpenForCausalLM"
_MOE = {key: value for key, value in SMALL_MOE.items() if key != "first_k_dense_replace"}
CASES = {
    "solar_open": dict(_MOE, head_dim=12, attention_bias=True, n_group=2, topk_group=1),
    "solar_open-not-normalised-tied": dict(
        _MOE, head_dim=8, norm_topk_prob=False, routed_scaling_factor=2.5, tie_word_embeddings=True, n_shared_experts=2
    ),
    "solar_open-one-expert-one-kv-head": dict(
        _MOE, head_dim=16, num_experts_per_tok=1, num_key_value_heads=1, num_hidden_layers=1
    ),
    "solar_open-mha-yarn": dict(
        _MOE,
        head_dim=8,
        num_key_value_heads=4,
        num_hidden_layers=3,
        rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=16),
    ),
}
