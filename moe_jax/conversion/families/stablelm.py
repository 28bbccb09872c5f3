"""StableLM-2 and StableLM-3B: LayerNorms with biases, and a quarter of each head rotated.

In StableLM-2 12B, attention and FFN stand in parallel after one norm, and every head has a q/k norm of its own.
"""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual_keys as usual
from moe_jax.conversion.families.family import EMBEDDING, GATED_FFN, HEAD, PLAIN_ATTENTION, SCORE, Family
from moe_jax.conversion.table import norm
from moe_jax.models import LayerConfig, ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    attention = usual.read_attention(
        config,
        biases=usual.read_biases(config, "use_qkv_bias", ("q", "k", "v")),
        qk_norm="head_layer" if config.flag("qk_layernorm") else "none",
    )
    usual.check_heads_fill_width(config, attention, "stablelm")
    parallel = config.flag("use_parallel_residual")
    layer = LayerConfig(attention=attention, mlp=usual.read_gated_ffn(config), parallel=parallel, shared_norm=parallel)
    return usual.read_decoder(
        config, "stablelm", [layer] * usual.num_layers(config), norm="layer", eps="layer_norm_eps"
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **usual.write_dense(config, eps="layer_norm_eps"),
        # Written even if the whole head is rotated: the default is a quarter.
        "partial_rotary_factor": config.rope.fraction,
        **usual.write_biases(config, "use_qkv_bias"),
        "qk_layernorm": usual.same_in_all_layers(config, "q/k norm", lambda layer: layer.attention.qk_norm) != "none",
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
    read=_read,
    write=_write,
    table=(
        *EMBEDDING,
        *PLAIN_ATTENTION,
        *norm("model.layers.{i}.self_attn.q_layernorm.norms.{e}", "layers/{i}/attention/q_norm"),
        *norm("model.layers.{i}.self_attn.k_layernorm.norms.{e}", "layers/{i}/attention/k_norm"),
        *GATED_FFN,
        *HEAD,
    ),
)
