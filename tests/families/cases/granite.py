CONFIG, MODEL = "GraniteConfig", "GraniteForCausalLM"
FACTORS = dict(
    num_hidden_layers=2,
    embedding_multiplier=5.0,
    attention_multiplier=0.2,
    residual_multiplier=0.22,
    logits_scaling=0.7,
)
CASES = {
    "granite": dict(FACTORS),
    "granite-biases-tied": dict(FACTORS, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "granite-no-factors": dict(num_hidden_layers=2, num_key_value_heads=4, attention_multiplier=0.35),
    "granite-one-kv-head-linear-rope": dict(
        FACTORS, num_key_value_heads=1, rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)
    ),
}
