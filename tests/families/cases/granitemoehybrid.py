from tests.families.cases.granite import FACTORS

CONFIG, MODEL = "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"
_MAMBA = dict(
    FACTORS,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    shared_intermediate_size=20,
    mamba_n_heads=4,
    mamba_d_state=8,
    mamba_chunk_size=16,
    rms_norm_eps=1e-3,  # a head that reads next to nothing would be rounding, made large by its norm
)
CASES = {
    "granitemoehybrid": dict(_MAMBA, num_local_experts=6, num_experts_per_tok=3),
    "granitemoehybrid-dense-groups-biases-rotated-tied": dict(
        _MAMBA,
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        num_local_experts=0,
        mamba_n_groups=2,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_d_conv=3,
        attention_bias=True,
        position_embedding_type="rope",
        tie_word_embeddings=True,
    ),
    "granitemoehybrid-one-kv-head-one-expert": dict(
        _MAMBA, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=1, mamba_chunk_size=8, mamba_d_conv=2
    ),
    "granitemoehybrid-attention-first-mha-rotated": dict(
        _MAMBA,
        layer_types=["full_attention", "linear_attention"],
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        position_embedding_type="rope",
    ),
    # As the small ones that are called dense: no layer has Mamba-2.
    "granitemoehybrid-all-attention": dict(
        _MAMBA, layer_types=["full_attention"] * 2, num_local_experts=0, position_embedding_type="rope"
    ),
}
