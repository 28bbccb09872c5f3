from tests.families.cases.deepseek_v32 import INDEXED

CONFIG, MODEL = "GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"
CASES = {
    "glm_moe_dsa": INDEXED,
    "glm_moe_dsa-shared-all-chosen-listed": dict(
        INDEXED,
        num_hidden_layers=3,
        index_topk=96,
        indexer_types=["full", "shared", "full"],
        mlp_layer_types=["sparse", "dense", "sparse"],
        tie_word_embeddings=True,
    ),
    "glm_moe_dsa-groups-not-normalised": {
        **INDEXED,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
        "index_topk": 9,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "glm_moe_dsa-shared-twice-biases": {
        **INDEXED,
        "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "shared", "full"],
        "index_topk": 96,
        "attention_bias": True,
        "n_shared_experts": 2,
    },
}
