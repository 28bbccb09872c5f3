CONFIG, MODEL = "MixtralConfig", "MixtralForCausalLM"
CASES = {
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "mixtral-top3-window": dict(num_local_experts=5, num_experts_per_tok=3, sliding_window=8, head_dim=16),
    "mixtral-one-expert-tied": dict(num_local_experts=3, num_experts_per_tok=1, tie_word_embeddings=True),
    "mixtral-all-experts-mha": dict(num_local_experts=4, num_experts_per_tok=4, num_key_value_heads=4),
}
