from tests.families.cases.granite import FACTORS

CONFIG, MODEL = "GraniteMoeConfig", "GraniteMoeForCausalLM"
CASES = {
    "granitemoe": dict(FACTORS, num_local_experts=6, num_experts_per_tok=3),
    "granitemoe-biases-tied": dict(FACTORS, attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1),
}
