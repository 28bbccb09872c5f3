from tests.families.cases.deepseek_v2 import LATENT, YARN

CONFIG, MODEL = "DeepseekV3Config", "DeepseekV3ForCausalLM"
CASES = {
    "deepseek_v3": dict(
        **LATENT,
        q_lora_rank=20,
        n_group=4,
        topk_group=2,
        rope_parameters=dict(**YARN, mscale=1.0, mscale_all_dim=1.0),
    ),
    "deepseek_v3-no-groups-not-normalised": dict(
        **LATENT, q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0
    ),
    "deepseek_v3-as-kimi-k2": {
        **LATENT,
        "q_lora_rank": 20,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v3-biases-halves-rotated": {
        **LATENT,
        "q_lora_rank": 20,
        "attention_bias": True,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "rope_interleave": False,
        "rms_norm_eps": 1e-3,
    },
    "deepseek_v3-all-dense-tied": {
        **LATENT,
        "q_lora_rank": None,
        "first_k_dense_replace": 3,
        "tie_word_embeddings": True,
        "rope_parameters": YARN,
    },
    "deepseek_v3-one-expert-per-token": {
        **LATENT,
        "n_group": 2,
        "topk_group": 2,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": 2,
    },
}
