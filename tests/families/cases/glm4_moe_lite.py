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
}
