CONFIG, MODEL = "GemmaConfig", "GemmaForCausalLM"
CASES = {
    "gemma": dict(head_dim=16),
    "gemma-first-name-of-gelu": dict(head_dim=8, hidden_act="gelu", num_key_value_heads=4, rms_norm_eps=1e-2),
    "gemma-untied-biases": dict(head_dim=24, num_key_value_heads=1, attention_bias=True, tie_word_embeddings=False),
    "gemma-linear-rope": dict(head_dim=10, rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e3)),
}
