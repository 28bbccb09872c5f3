"""Granite 3: Llama with four factors, and its MoEs, of which some have a shared expert."""

import math
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.table import FUSED, PER_EXPERT, Row, Table
from moe_jax.core.errors import InputError
from moe_jax.models import FFNConfig, LayerConfig, ModelConfig, MoEConfig

FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "intermediate_size": 11008,
    "attention_bias": False,
    **dict.fromkeys(FACTORS, 1.0),
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE_DEFAULTS = _DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}


def _read(config: HFConfig, family: str, mlp: FFNConfig | MoEConfig) -> ModelConfig:
    """Reads a model whose layers all have this FFN or MoE."""
    embedding, attention, residual, logits = read_factors(config)
    layer = LayerConfig(
        attention=usual.read_attention(config, biases=usual.read_biases(config), scale=attention),
        mlp=mlp,
        residual_scale=residual,
    )
    layers = [layer] * usual.num_layers(config)
    return usual.read_decoder(config, family, layers, embed_scale=embedding, logit_scale=1 / logits)


def read_factors(config: HFConfig) -> list[float]:
    """Reads the factors of embeddings, scores and branches, and the divisor of logits."""
    factors = [config.required_number(key) for key in FACTORS]
    for key, factor in zip(FACTORS, factors, strict=True):
        if factor <= 0:
            raise InputError(f"config.json: {key}={factor} must be above 0")
    return factors


def write_factors(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that `read_factors` reads."""
    scale = usual.same_attention(config, "scale of scores", lambda attention: attention.score_scale)
    residual = usual.same_in_all_layers(config, "scale of what is added", lambda layer: layer.residual_scale)
    values = (config.embed_scale, scale, residual, _inverse(config.logit_scale))
    return dict(zip(FACTORS, values, strict=True))


def _inverse(number: float) -> float:
    """Returns the number that this one is the inverse of: a whole one, or one of the nearest, if there is such."""
    near = 1 / number
    candidates = (float(round(near)), near, math.nextafter(near, 0.0), math.nextafter(near, math.inf))
    return next((one for one in candidates if one and 1 / one == number), near)


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    moe = usual.uniform_moe(config)
    return {
        **usual.write_decoder(config),
        **usual.write_biases(config),
        **usual.write_ffn(moe.expert),
        **usual.write_moe(moe, "num_local_experts"),
        **write_factors(config),
    }


GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    defaults=_DEFAULTS | {"mlp_bias": False},
    read=lambda config: _read(config, "granite", usual.read_gated_ffn(config, bias=config.flag("mlp_bias"))),
    write=lambda config: {
        **usual.write_dense(config),
        **usual.write_biases(config),
        "mlp_bias": config.ffn(0).bias,
        **write_factors(config),
    },
    table=(*usual.EMBEDDING, *usual.PLAIN_ATTENTION, *usual.GATED_FFN, *usual.HEAD),
    moe_formats=("granitemoe", "granitemoeshared"),
)

# --- MoEs: all experts of a layer are in two tensors, in both layouts -----------------------------


def _experts(first: str, last: str, router: str, layout: str) -> Table:
    """Returns the rows of an MoE whose tensors have these names in the module of the layer."""
    at, ours = "model.layers.{i}.block_sparse_moe", "layers/{i}/mlp"
    into = (f"{ours}/experts/gate/kernel", f"{ours}/experts/up/kernel")
    return (
        Row(f"{at}.{router}", f"{ours}/router/kernel", transpose=True, layout=layout),
        Row(f"{at}.{first}", into, transpose=True, layout=layout),
        Row(f"{at}.{last}", f"{ours}/experts/down/kernel", transpose=True, layout=layout),
    )


# Those of published checkpoints, and those that Transformers 5 has for them.
MOE: Table = (
    *_experts("input_linear.weight", "output_linear.weight", "router.layer.weight", PER_EXPERT),
    *_experts("experts.gate_up_proj", "experts.down_proj", "router.weight", FUSED),
)


def read_experts(config: HFConfig, **kwargs: Any) -> MoEConfig:
    """Reads the MoE that all layers have; further keywords go to `MoEConfig`."""
    return usual.read_moe(config, config.required_integer("num_local_experts"), gate="topk_softmax", **kwargs)


GRANITEMOE = Family(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    defaults=_MOE_DEFAULTS,
    read=lambda config: _read(config, "granitemoe", read_experts(config)),
    write=_write_moe,
    balance_over="model",
    table=(*usual.EMBEDDING, *usual.PLAIN_ATTENTION, *MOE, *usual.HEAD),
)

# --- with a shared expert of any width, that every token sees with weight 1 -----------------------


def _read_shared(config: HFConfig) -> ModelConfig:
    width = config.required_integer("shared_intermediate_size")
    shared = {"universal": "one", "universal_dim": width} if width else {}
    return _read(config, "granitemoeshared", read_experts(config, **shared))


def _write_shared(config: ModelConfig) -> dict[str, Any]:
    moe = usual.uniform_moe(config)
    return _write_moe(config) | {"shared_intermediate_size": moe.universal_ffn.dim if moe.universal_beside else 0}


def shared_ffn(ours: str) -> Table:
    """Returns the rows of the FFN that every token sees, for the module `ours`."""
    theirs, into = "model.layers.{i}.shared_mlp", (f"{ours}/gate/kernel", f"{ours}/up/kernel")
    return (
        Row(f"{theirs}.input_linear.weight", into, transpose=True),
        Row(f"{theirs}.output_linear.weight", f"{ours}/down/kernel", transpose=True),
    )


GRANITEMOESHARED = Family(
    name="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    defaults=_MOE_DEFAULTS | {"shared_intermediate_size": 0},
    read=_read_shared,
    write=_write_shared,
    balance_over="model",
    table=(
        *usual.EMBEDDING,
        *usual.PLAIN_ATTENTION,
        *MOE,
        *shared_ffn("layers/{i}/mlp/universal"),
        *usual.HEAD,
    ),
)
