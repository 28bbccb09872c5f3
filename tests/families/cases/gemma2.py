CONFIG, MODEL = "Gemma2Config", "Gemma2ForCausalLM"
CASES = {
    "gemma2": dict(
        head_dim=12, sliding_window=4, attn_logit_softcapping=0.5, final_logit_softcapping=2.0, query_pre_attn_scalar=10
    ),
    "gemma2-default-caps": dict(head_dim=16, sliding_window=8),
    "gemma2-without-caps": dict(
        head_dim=8,
        num_key_value_heads=4,
        sliding_window=8,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
    ),
    "gemma2-layer-types-biases": dict(
        head_dim=24,
        num_key_value_heads=1,
        num_hidden_layers=4,
        sliding_window=8,
        query_pre_attn_scalar=144,
        attn_logit_softcapping=1.0,
        attention_bias=True,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    ),
}
