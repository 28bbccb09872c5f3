from tests.families.cases.granite import FACTORS

CONFIG, MODEL = "GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM"
CASES = {
    "granitemoeshared": dict(FACTORS, num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=20),
    "granitemoeshared-nothing-shared": dict(FACTORS, num_local_experts=4, tie_word_embeddings=True),
}
