CONFIG, MODEL = "Cohere2Config", "Cohere2ForCausalLM"
CASES = {
    "cohere2": dict(
        num_hidden_layers=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"], logit_scale=0.5
    ),
    "cohere2-every-fourth-biases-untied": dict(
        num_hidden_layers=5, sliding_window=8, attention_bias=True, tie_word_embeddings=False, logit_scale=2.0
    ),
    "cohere2-one-kv-head-short-windows": dict(
        num_key_value_heads=1,
        logit_scale=1.0,
        sliding_window=5,
        layer_types=["full_attention"] + ["sliding_attention"] * 2,
    ),
    "cohere2-mha-no-window": dict(
        num_key_value_heads=4, logit_scale=1.0, layer_types=["full_attention"] * 3, layer_norm_eps=1e-3
    ),
}
