"""Qwen3.5 and 3.6, the language models of them: the gated delta rule in most layers, dense or with MoEs.

Published checkpoints hold a vision tower beside them, and layers that predict further tokens. Both are left out.
"""

from collections.abc import Callable
from typing import Any

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families import usual
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.hybrid.delta_rule_layers import (
    DEFAULTS,
    FURTHER,
    HARMLESS,
    SHARED_EXPERT,
    groups_of_queries,
    joined,
    mixers,
    read_mixers,
    shapes,
    write_mixers,
)
from moe_jax.conversion.families.rope_keys import SCALINGS, read_rope, write_rope
from moe_jax.conversion.table import Table
from moe_jax.models import FFNConfig, LayerConfig, ModelConfig, MoEConfig, RopeConfig

_DENSE, _MOE = "qwen3_5_text", "qwen3_5_moe_text"
# Axes of the positions of pictures' patches: those of a text's tokens are equal along all three.
_OF_PICTURES = ("mrope_section", "mrope_interleaved")


def _reader(family: str, read_mlp: Callable[[HFConfig], FFNConfig | MoEConfig]) -> Callable[[HFConfig], ModelConfig]:
    def read(config: HFConfig) -> ModelConfig:
        attention, mlp = read_mixers(config), read_mlp(config)
        layers = [LayerConfig(attention=one, mlp=mlp) for one in attention]
        return usual.read_decoder(config, family, layers, norm="rms_plus_one", rope=_read_rope(config))

    return read


def _read_moe(config: HFConfig) -> MoEConfig:
    config.must_be("mlp_only_layers", [])
    return usual.read_moe(
        config,
        config.required_integer("num_experts"),
        dim="moe_intermediate_size",
        gate="topk_softmax",
        universal="sigmoid",
        universal_dim=config.required_integer("shared_expert_intermediate_size"),
    )


def _read_rope(config: HFConfig) -> RopeConfig:
    """Reads the rotary embedding; keys about pictures are written back."""
    given: dict[str, Any] = {key: config.mapping(key) or {} for key in ("rope_parameters", "rope_scaling")}
    kept = {key: {name: one[name] for name in _OF_PICTURES if name in one} for key, one in given.items()}
    plain = {key: {name: one[name] for name in one if name not in _OF_PICTURES} for key, one in given.items()}
    defaults = {key: config.number(key) for key in ("rope_theta", "partial_rotary_factor")}
    given_beside = {key: value for key, value in defaults.items() if config.given(key)}
    one = HFConfig({**plain, **given_beside}, defaults)
    rope = read_rope(
        one,
        max_positions=config.required_integer("max_position_embeddings"),
        head_dim=config.required_integer("head_dim"),
    )
    if unknown := one.unread_keys().get("rope_scaling"):
        config.unknown_inside("rope_parameters", unknown)
    if of_pictures := kept["rope_parameters"] | kept["rope_scaling"]:
        config.keep("rope_parameters", of_pictures)
    return rope


def _write(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that dense models and MoEs share; the first release that reads them has `rope_parameters`."""
    keys = {**write_mixers(config), **usual.write_decoder(config)}
    rope = write_rope(config.rope)
    keys = {key: value for key, value in keys.items() if key not in rope}
    scaling = rope.pop("rope_scaling") or {}
    names = [scaling.pop(key, None) for key in ("rope_type", "type")]
    kind = next((name for name in names if name is not None), _DEFAULT)
    return keys | {"rope_parameters": {"rope_type": kind, "partial_rotary_factor": 1.0, **rope, **scaling}}


_DEFAULT = next(theirs for theirs, ours in SCALINGS.items() if ours == "none")


def _write_dense(config: ModelConfig) -> dict[str, Any]:
    return _write(config) | usual.write_ffn(usual.dense_ffn(config))


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    moe = usual.uniform_moe(config)
    keys = {key: value for key, value in usual.write_moe(moe).items() if key != "norm_topk_prob"}
    return {
        **_write(config),
        **keys,
        "hidden_act": usual.write_activation(moe.expert),
        "moe_intermediate_size": moe.expert.dim,
        "shared_expert_intermediate_size": moe.universal_ffn.dim,
    }


def _table(mlp: Table) -> Table:
    projections = [joined("in_proj_qkv", "q", "k", "v")]
    projections += [
        joined(f"in_proj_{theirs}", ours) for theirs, ours in (("z", "gate"), ("b", "beta"), ("a", "decay"))
    ]
    return (*usual.EMBEDDING, *mixers(*projections), *mlp, *usual.HEAD, FURTHER)


_SHARED: dict[str, Any] = dict(
    shapes=shapes,
    groups=groups_of_queries,
    recurrent=True,
)

QWEN3_5 = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    defaults={**DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 12288},
    read=_reader(_DENSE, usual.read_gated_ffn),
    write=_write_dense,
    table=_table(usual.GATED_FFN),
    moe_formats=(_MOE,),
    harmless=HARMLESS,
    **_SHARED,
)

QWEN3_5_MOE = Family(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "router_aux_loss_coef": 0.001,
        "num_experts_per_tok": 8,
    },
    read=_reader(_MOE, _read_moe),
    write=_write_moe,
    balance_over="model",
    universal="sigmoid",
    harmless=(*HARMLESS, "intermediate_size"),  # no layer is dense
    table=_table(SHARED_EXPERT),
    **_SHARED,
)
