"""GLM-4 (0414): four norms in a layer, half of each head rotated with neighbours, and a fused FFN."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import SCORE, Family
from moe_jax.conversion.table import norm
from moe_jax.models import LayerConfig, ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    biases = usual.read_biases(config, projections=("q", "k", "v"))
    layer = LayerConfig(
        attention=usual.read_attention(config, biases=biases, rope_interleaved=True),
        mlp=usual.read_gated_ffn(config),
        norm_position="both",
    )
    return usual.read_decoder(config, "glm4", [layer] * usual.num_layers(config))


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **usual.write_dense(config),
        # Left out, it would mean one half, and not the whole head as in other families.
        "partial_rotary_factor": config.rope.fraction,
        **usual.write_biases(config, what="q/k/v bias"),
    }


GLM4 = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    classifier=SCORE,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 13696,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
    read=_read,
    write=_write,
    table=(
        *usual.EMBEDDING,
        *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
        *usual.PROJECTIONS,
        *norm("model.layers.{i}.post_self_attn_layernorm", "layers/{i}/attention_output_norm"),
        *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/mlp_norm"),
        *usual.JOINED_FFN,
        *norm("model.layers.{i}.post_mlp_layernorm", "layers/{i}/mlp_output_norm"),
        *usual.HEAD,
    ),
)
