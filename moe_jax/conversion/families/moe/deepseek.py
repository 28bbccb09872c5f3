"""DeepSeekMoE 16B, the first: plain attention, a dense first layer, shared experts beside many small ones.

Transformers has no class for it; its code comes with the checkpoint.
"""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.deepseek_moes import MLP, TRAINING_KEYS, read_layers, write_layers
from moe_jax.conversion.families.parts.family import (
    EMBEDDING,
    HEAD,
    PLAIN_ATTENTION,
    Family,
    read_attention,
    read_decoder,
    same_in_all_layers,
    write_decoder,
)
from moe_jax.core.errors import InputError
from moe_jax.models import ModelConfig, SelectionConfig


def _read(config: HFConfig) -> ModelConfig:
    config.must_be("scoring_func", "softmax")
    attention = read_attention(config, biases=("q", "k", "v", "o") if config.flag("attention_bias") else ())
    d_model = config.required_integer("hidden_size")
    if attention.num_heads * attention.head_dim != d_model:
        raise InputError(
            f"config.json: in the format of 'deepseek' head_dim is hidden_size / num_attention_heads = {d_model} / "
            f"{attention.num_heads}, not {attention.head_dim}"
        )
    # The weight of a single expert is not renormalised.
    renormalised = config.flag("norm_topk_prob") and config.integer("num_experts_per_tok") != 1
    gate = "topk_softmax" if renormalised else "softmax_topk"
    return read_decoder(config, "deepseek", read_layers(config, attention, gate=gate, selection=SelectionConfig()))


def _write(config: ModelConfig) -> dict[str, Any]:
    keys = write_decoder(config) | write_layers(config)
    keys["attention_bias"] = same_in_all_layers(config, "attention bias", lambda layer: bool(layer.attention.biases))
    if config.moe_layers:
        keys["norm_topk_prob"] = config.moe(config.moe_layers[0]).gate == "topk_softmax"
    return keys


FAMILY = Family(
    name="deepseek",
    own_code=True,
    architecture="DeepseekForCausalLM",
    # From the config class that comes with the checkpoint.
    defaults={
        "hidden_act": "silu",
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 32,
        "attention_bias": False,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "aux_loss_alpha": 0.001,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
    },
    harmless=TRAINING_KEYS,
    read=_read,
    write=_write,
    table=(*EMBEDDING, *PLAIN_ATTENTION, *MLP, *HEAD),
)
