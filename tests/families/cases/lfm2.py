CONFIG, MODEL = "Lfm2Config", "Lfm2ForCausalLM"
CASES = {
    "lfm2": dict(
        num_hidden_layers=2,
        layer_types=["conv", "full_attention"],
        intermediate_size=60,
        block_multiple_of=8,
    ),
    "lfm2-biases-listed-untied": dict(
        num_hidden_layers=5,
        head_dim=12,
        full_attn_idxs=[2, 3],
        conv_bias=True,
        conv_L_cache=5,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    ),
    "lfm2-widened-all-attention": dict(
        layer_types=None, block_ffn_dim_multiplier=1.3, block_multiple_of=16, norm_eps=1e-3
    ),
    "lfm2-one-kv-head-attention-first": dict(
        num_key_value_heads=1,
        layer_types=["full_attention", "conv", "conv"],
        conv_L_cache=2,
        block_auto_adjust_ff_dim=False,
    ),
}
