from tests.families.cases.deepseek_v32 import INDEXED

CONFIG, MODEL = "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"
CASES = {
    "glm_moe_dsa": INDEXED,
    "glm_moe_dsa-shared-all-chosen-listed": dict(
        INDEXED,
        num_hidden_layers=3,
        index_topk=64,
        indexer_types=["full", "shared", "full"],
        mlp_layer_types=["sparse", "dense", "sparse"],
        tie_word_embeddings=True,
    ),
}
