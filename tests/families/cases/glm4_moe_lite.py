from tests.families.cases.deepseek_v2 import LATENT, YARN

CONFIG, MODEL = "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"
_LATENT = {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"} | dict(num_hidden_layers=2)
CASES = {
    "glm4_moe_lite": dict(_LATENT, q_lora_rank=20, rope_parameters=dict(**YARN, mscale=1.0, mscale_all_dim=1.0)),
    "glm4_moe_lite-listed-halves-rotated": dict(
        _LATENT,
        q_lora_rank=None,
        mlp_layer_types=["sparse", "dense"],
        rope_interleave=False,
        attention_bias=True,
        n_group=2,
        topk_group=1,
        tie_word_embeddings=True,
    ),
    "glm4_moe_lite-all-sparse-not-normalised": dict(
        _LATENT, num_hidden_layers=3, q_lora_rank=12, mlp_layer_types=["sparse"] * 3, norm_topk_prob=False
    ),
    "glm4_moe_lite-one-expert-two-shared": dict(_LATENT, q_lora_rank=20, num_experts_per_tok=1, n_shared_experts=2),
}
