"""Phi-1, Phi-1.5 and Phi-2: attention and a plain FFN in parallel behind one LayerNorm, with biases everywhere."""

from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual_keys as usual
from moe_jax.conversion.families.family import EMBEDDING, LM_HEAD, SCORE, Family
from moe_jax.conversion.table import linear, norm
from moe_jax.models import FFNConfig, LayerConfig, ModelConfig


def _read(config: HFConfig) -> ModelConfig:
    config.must_be("qk_layernorm", False)
    layer = LayerConfig(
        attention=usual.read_attention(config, biases=("q", "k", "v", "o")),
        mlp=FFNConfig(
            dim=config.required_integer("intermediate_size"),
            gated=False,
            activation=usual.read_activation(config),
            bias=True,
        ),
        parallel=True,
        shared_norm=True,
    )
    return usual.read_decoder(
        config, "phi", [layer] * usual.num_layers(config), norm="layer", eps="layer_norm_eps", head_bias=True
    )


def _write(config: ModelConfig) -> dict[str, Any]:
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
    read=_read,
    write=_write,
    table=(
        *EMBEDDING,
        *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
        *linear("model.layers.{i}.self_attn.q_proj", "layers/{i}/attention/q"),
        *linear("model.layers.{i}.self_attn.k_proj", "layers/{i}/attention/k"),
        *linear("model.layers.{i}.self_attn.v_proj", "layers/{i}/attention/v"),
        *linear("model.layers.{i}.self_attn.dense", "layers/{i}/attention/o"),
        *linear("model.layers.{i}.mlp.fc1", "layers/{i}/mlp/up"),
        *linear("model.layers.{i}.mlp.fc2", "layers/{i}/mlp/down"),
        *norm("model.final_layernorm", "final_norm"),
        *LM_HEAD,
    ),
)
