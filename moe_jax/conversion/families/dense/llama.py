"""Llama and models in its format (Yi, DeepSeek-Coder and many others), Mistral, Mixtral, and OLMoE."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import SCORE, Family
from moe_jax.conversion.families.windows import write_window
from moe_jax.conversion.table import FUSED, PER_EXPERT, linear
from moe_jax.models import ModelConfig

_DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL_DEFAULTS = {**_DEFAULTS, "num_key_value_heads": 8, "max_position_embeddings": 4096 * 32}


def _read_llama(config: HFConfig) -> ModelConfig:
    attention = usual.read_attention(config, biases=usual.read_biases(config))
    ffn = usual.read_gated_ffn(config, bias=config.flag("mlp_bias"))
    return usual.read_decoder(config, "llama", usual.repeat_layers(config, attention, ffn))


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    classifier=SCORE,
    defaults=_DEFAULTS,
    read=_read_llama,
    write=lambda config: usual.write_dense(config) | usual.write_biases(config) | {"mlp_bias": config.ffn(0).bias},
    table=(*usual.EMBEDDING, *usual.ATTENTION, *usual.GATED_FFN, *usual.HEAD),
    moe_formats=("mixtral", "qwen2_moe", "deepseek"),
)

# --- Mistral: Llama without biases, with one sliding window for all layers ------------------------


def _read_mistral(config: HFConfig) -> ModelConfig:
    attention = usual.read_attention(config, sliding_window=config.integer("sliding_window"))
    return usual.read_decoder(config, "mistral", usual.repeat_layers(config, attention, usual.read_gated_ffn(config)))


MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    classifier=SCORE,
    defaults={**_MISTRAL_DEFAULTS, "sliding_window": 4096},
    read=_read_mistral,
    write=lambda config: usual.write_dense(config) | write_window(config),
    table=LLAMA.table,
    moe_formats=LLAMA.moe_formats,
)

# --- Mixtral: Mistral with an MoE in every layer; the softmax is over the chosen experts ----------


def _read_mixtral(config: HFConfig) -> ModelConfig:
    config.require("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef")
    attention = usual.read_attention(config, sliding_window=config.integer("sliding_window"))
    moe = usual.read_moe(config, config.required_integer("num_local_experts"), gate="topk_softmax")
    return usual.read_decoder(config, "mixtral", usual.repeat_layers(config, attention, moe))


def _write_mixtral(config: ModelConfig) -> dict[str, Any]:
    moe = usual.uniform_moe(config)
    return {
        **usual.write_decoder(config),
        **usual.write_ffn(moe.expert),
        **usual.write_moe(moe, "num_local_experts"),
        **write_window(config),
    }


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    classifier=SCORE,
    defaults={
        **_MISTRAL_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    read=_read_mixtral,
    write=_write_mixtral,
    balance_over="model",
    table=(
        *usual.EMBEDDING,
        *usual.ATTENTION,
        *linear("model.layers.{i}.block_sparse_moe.gate", "layers/{i}/mlp/router", PER_EXPERT),
        *linear("model.layers.{i}.mlp.gate", "layers/{i}/mlp/router", FUSED),
        *usual.gated_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        *usual.HEAD,
    ),
)

# --- OLMoE: q/k norm over the whole projection, MoEs whose gate weights are not renormalised ------


def _read_olmoe(config: HFConfig) -> ModelConfig:
    config.require("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    biases, clip_qkv = usual.read_biases(config), config.number("clip_qkv")
    attention = usual.read_attention(config, biases=biases, qk_norm="projection", clip_qkv=clip_qkv)
    moe = usual.read_moe(config, config.required_integer("num_experts"), gate=usual.read_gate(config))
    return usual.read_decoder(config, "olmoe", usual.repeat_layers(config, attention, moe))


def _write_olmoe(config: ModelConfig) -> dict[str, Any]:
    moe = usual.uniform_moe(config)
    return {
        **usual.write_decoder(config),
        **usual.write_ffn(moe.expert),
        **usual.write_moe(moe),
        **usual.write_biases(config),
        "clip_qkv": usual.same_attention(config, "clip_qkv", lambda attention: attention.clip_qkv),
    }


OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.01,
        "norm_topk_prob": False,
        "eos_token_id": 50279,
    },
    read=_read_olmoe,
    write=_write_olmoe,
    balance_over="model",
    table=(*usual.EMBEDDING, *usual.ATTENTION, *usual.ROUTER, *usual.gated_experts(), *usual.HEAD),
)
