from tests.families.cases.deepseek_v2 import LATENT, YARN

CONFIG, MODEL = "DeepseekV32Config", "DeepseekV32ForCausalLM"
# Of many heads, hardly ever are all scores of a key zero: which of equal ones count is for nobody to say.
INDEXED = dict(LATENT, num_hidden_layers=2, q_lora_rank=20, index_n_heads=16, index_head_dim=8, index_topk=6)
CASES = {
    "deepseek_v32": dict(
        **INDEXED, n_group=4, topk_group=2, rope_parameters=dict(**YARN, mscale=1.0, mscale_all_dim=1.0)
    ),
    "deepseek_v32-all-chosen-biases": {
        **INDEXED,
        "n_group": 1,
        "topk_group": 1,
        "index_topk": 64,
        "index_n_heads": 2,
        "attention_bias": True,
        "first_k_dense_replace": 0,
    },
    "deepseek_v32-not-normalised-tied": {
        **INDEXED,
        "num_hidden_layers": 3,
        "n_group": 2,
        "topk_group": 1,
        "index_topk": 9,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "tie_word_embeddings": True,
    },
    "deepseek_v32-dense": {**INDEXED, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "q_lora_rank": 12},
}
