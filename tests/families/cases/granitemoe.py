from tests.families.cases.granite import FACTORS

CONFIG, MODEL = "GraniteMoeConfig", "GraniteMoeForCausalLM"
CASES = {
    "granitemoe": dict(FACTORS, num_local_experts=6, num_experts_per_tok=3),
    "granitemoe-biases-tied": dict(FACTORS, attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1),
    "granitemoe-one-expert-mha": dict(FACTORS, num_local_experts=4, num_experts_per_tok=1, num_key_value_heads=4),
    "granitemoe-no-factors-linear-rope": dict(
        num_local_experts=5,
        num_experts_per_tok=4,
        attention_multiplier=0.35,
        rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4),
    ),
}
