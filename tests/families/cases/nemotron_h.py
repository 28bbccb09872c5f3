CONFIG, MODEL = "NemotronHConfig", "NemotronHForCausalLM"
_MAMBA = dict(
    layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
    head_dim=12,
    mamba_num_heads=4,
    mamba_head_dim=8,
    ssm_state_size=10,
    n_groups=2,
    chunk_size=16,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    moe_shared_expert_intermediate_size=20,
    layer_norm_epsilon=1e-3,  # a head that reads next to nothing would be rounding, made large by its norm
)
CASES = {
    "nemotron_h": dict(_MAMBA, routed_scaling_factor=1.5),
    "nemotron_h-groups-biases": dict(
        _MAMBA,
        layers_block_type=["mlp", "linear_attention", "linear_attention", "full_attention", "mlp"],
        n_groups=1,
        conv_kernel=3,
        use_conv_bias=False,
        use_bias=True,
        mlp_bias=True,
        mlp_hidden_act="silu",
    ),
    "nemotron_h-groups-of-experts": dict(_MAMBA, n_group=4, topk_group=2, norm_topk_prob=False),
    "nemotron_h-one-expert-one-kv-head": dict(
        _MAMBA,
        layers_block_type=["full_attention", "moe", "linear_attention", "moe"],
        num_key_value_heads=1,
        num_experts_per_tok=1,
        n_groups=4,
        conv_kernel=2,
    ),
}
