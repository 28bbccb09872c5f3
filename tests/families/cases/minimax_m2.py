CONFIG, MODEL = "MiniMaxM2Config", "MiniMaxM2ForCausalLM"
_MOE = dict(num_hidden_layers=2, head_dim=12, num_local_experts=8, num_experts_per_tok=3)
CASES = {
    "minimax_m2": dict(_MOE, rotary_dim=6),
    "minimax_m2-whole-heads-tied": dict(_MOE, tie_word_embeddings=True, num_key_value_heads=4),
    "minimax_m2-one-expert-per-token": dict(_MOE, rotary_dim=4, num_experts_per_tok=1, num_key_value_heads=1),
    "minimax_m2-all-experts-one-layer": dict(
        _MOE, rotary_dim=8, num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=4, rms_norm_eps=1e-3
    ),
}
