from tests.families.cases.deepseek_v2 import LATENT

CONFIG, MODEL = "Mistral4Config", "Mistral4ForCausalLM"
_YARN = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=8.0,
    original_max_position_embeddings=16,
    beta_fast=32.0,
    beta_slow=1.0,
    llama_4_scaling_beta=0.1,
)
CASES = {
    "mistral4": dict(
        LATENT, q_lora_rank=20, first_k_dense_replace=0, rope_parameters=dict(_YARN, mscale=1.0, mscale_all_dim=1.0)
    ),
    "mistral4-groups-dense-first": dict(
        LATENT,
        q_lora_rank=None,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_parameters=dict(_YARN, llama_4_scaling_beta=0.5),
    ),
    "mistral4-not-normalised-halves-rotated-tied": dict(
        LATENT,
        q_lora_rank=20,
        norm_topk_prob=False,
        rope_interleave=False,
        attention_bias=True,
        n_shared_experts=2,
        tie_word_embeddings=True,
        rope_parameters=dict(_YARN, llama_4_scaling_beta=0.0, mscale_all_dim=0.707, mscale=0.707),
    ),
    "mistral4-one-expert-all-sparse": dict(
        LATENT,
        q_lora_rank=12,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        num_experts_per_tok=1,
        rope_parameters=dict(_YARN, factor=4.0),
    ),
}
