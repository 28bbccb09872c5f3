"""StableLM and Phi: LayerNorms with biases, and a part of each head rotated.

In StableLM-2 12B and in Phi, attention and FFN stand in parallel after one norm.
"""

from dataclasses import replace
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import SCORE, Family
from moe_jax.conversion.table import linear, norm
from moe_jax.models import LayerConfig, ModelConfig

# --- StableLM-3B and StableLM-2; in 12B every head has a q/k norm of its own ----------------------


def _read_stablelm(config: HFConfig) -> ModelConfig:
    attention = usual.read_attention(
        config,
        biases=usual.read_biases(config, "use_qkv_bias", ("q", "k", "v")),
        qk_norm="head_layer" if config.flag("qk_layernorm") else "none",
    )
    usual.check_heads_fill_width(config, attention, "stablelm")
    parallel = config.flag("use_parallel_residual")
    layer = LayerConfig(attention=attention, mlp=usual.read_gated_ffn(config), parallel=parallel, shared_norm=parallel)
    layers = [layer] * usual.num_layers(config)
    return usual.read_decoder(config, "stablelm", layers, norm="layer", eps="layer_norm_eps")


def _write_stablelm(config: ModelConfig) -> dict[str, Any]:
    return {
        **usual.write_dense(config, eps="layer_norm_eps"),
        # Written even if the whole head is rotated: the default is a quarter.
        "partial_rotary_factor": config.rope.fraction,
        **usual.write_biases(config, "use_qkv_bias"),
        "qk_layernorm": usual.same_attention(config, "q/k norm", lambda attention: attention.qk_norm) != "none",
        "use_parallel_residual": usual.same_in_all_layers(
            config, "order of attention and FFN", lambda layer: layer.parallel
        ),
    }


STABLELM = Family(
    name="stablelm",
    architecture="StableLmForCausalLM",
    classifier=SCORE,
    defaults={
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    read=_read_stablelm,
    write=_write_stablelm,
    table=(
        *usual.EMBEDDING,
        *usual.PLAIN_ATTENTION,
        *norm("model.layers.{i}.self_attn.q_layernorm.norms.{e}", "layers/{i}/attention/q_norm"),
        *norm("model.layers.{i}.self_attn.k_layernorm.norms.{e}", "layers/{i}/attention/k_norm"),
        *usual.GATED_FFN,
        *usual.HEAD,
    ),
    moe_formats=("moe_llava_stablelm",),
)

# --- Phi-1, Phi-1.5 and Phi-2: a plain FFN, and biases everywhere ---------------------------------


def _read_phi(config: HFConfig) -> ModelConfig:
    config.must_be("qk_layernorm", False)
    layer = LayerConfig(
        attention=usual.read_attention(config, biases=("q", "k", "v", "o")),
        mlp=replace(usual.read_gated_ffn(config, bias=True), gated=False),
        parallel=True,
        shared_norm=True,
    )
    layers = [layer] * usual.num_layers(config)
    return usual.read_decoder(config, "phi", layers, norm="layer", eps="layer_norm_eps", head_bias=True)


def _write_phi(config: ModelConfig) -> dict[str, Any]:
    return {
        **usual.write_dense(config, eps="layer_norm_eps"),
        # Of the names of this activation, the one that all checkpoints of the family have.
        **({"hidden_act": "gelu_new"} if config.ffn(0).activation == "gelu_tanh" else {}),
        # Left out, it would mean one half, and not the whole head as in other families.
        "partial_rotary_factor": config.rope.fraction,
    }


PHI = Family(
    name="phi",
    architecture="PhiForCausalLM",
    classifier=SCORE,
    defaults={
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=_read_phi,
    write=_write_phi,
    table=(
        *usual.EMBEDDING,
        *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
        *linear("model.layers.{i}.self_attn.q_proj", "layers/{i}/attention/q"),
        *linear("model.layers.{i}.self_attn.k_proj", "layers/{i}/attention/k"),
        *linear("model.layers.{i}.self_attn.v_proj", "layers/{i}/attention/v"),
        *linear("model.layers.{i}.self_attn.dense", "layers/{i}/attention/o"),
        *linear("model.layers.{i}.mlp.fc1", "layers/{i}/mlp/up"),
        *linear("model.layers.{i}.mlp.fc2", "layers/{i}/mlp/down"),
        *norm("model.final_layernorm", "final_norm"),
        *usual.LM_HEAD,
    ),
    moe_formats=("moe_llava_phi",),
)
