from tests.families.cases.granite import FACTORS

CONFIG, MODEL = "GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM"
CASES = {
    "granitemoeshared": dict(FACTORS, num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=20),
    "granitemoeshared-nothing-shared": dict(FACTORS, num_local_experts=4, tie_word_embeddings=True),
    "granitemoeshared-one-expert-biases": dict(
        FACTORS,
        num_local_experts=4,
        num_experts_per_tok=1,
        shared_intermediate_size=40,
        attention_bias=True,
        num_key_value_heads=1,
    ),
    "granitemoeshared-no-factors-mha": dict(
        num_local_experts=5,
        num_experts_per_tok=4,
        shared_intermediate_size=20,
        attention_multiplier=0.35,
        num_key_value_heads=4,
    ),
}
