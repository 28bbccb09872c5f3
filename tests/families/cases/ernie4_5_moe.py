CONFIG, MODEL = "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"
_MOE = dict(moe_intermediate_size=24, moe_num_experts=8, moe_k=3)
CASES = {
    "ernie4_5_moe": dict(_MOE, num_hidden_layers=2, moe_num_shared_experts=2),
    "ernie4_5_moe-every-second-untied": dict(
        _MOE, num_hidden_layers=5, moe_layer_interval=2, moe_layer_start_index=2, tie_word_embeddings=False
    ),
    "ernie4_5_moe-nothing-shared": dict(
        _MOE, num_hidden_layers=4, moe_num_shared_experts=0, moe_layer_start_index=1, moe_layer_end_index=2
    ),
    "ernie4_5_moe-one-expert-mha": dict(
        _MOE, moe_k=1, num_key_value_heads=4, moe_num_shared_experts=1, moe_layer_start_index=0
    ),
}
