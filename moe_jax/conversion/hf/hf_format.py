"""The Hugging Face format in which a model is exported: the first of its family's that gives the same logits.

A model can often be expressed in several ways that compute the same. So a model is first converted to the form of a
format. Then its config is written in the format and read back, which shows whether the format can hold it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from moe_jax.conversion.families import Family, family_named
from moe_jax.conversion.hf.harmless_keys import is_harmless
from moe_jax.conversion.hf.hf_config import inexpressible, write_hf_config
from moe_jax.core.errors import InputError
from moe_jax.functional.routing.gates import GATES
from moe_jax.models import BankConfig, LayerConfig, ModelConfig, MoEConfig

# A shared expert of zeros may be as narrow as possible.
NARROWEST = 1


def exported_config(config: ModelConfig, *, replicate_dense: bool) -> ModelConfig:
    """Returns the config of a model after merging, in the family whose format can hold it.

    A dense model is unchanged. In a model with MoE layers, deltas are merged into full experts. If its family has no
    MoE layers the model moves to the first of the family's `moe_formats` that can hold it; if that has no dense layers,
    they become MoEs of equal experts. Merged experts are repeated, one for each output of the router. Narrower experts,
    and universal FFNs, are padded to the largest width in any layer with zero neurons, which add nothing because act(0)
    = 0.

    Args:
      config: of the model.
      replicate_dense: whether dense layers may become MoEs.

    Raises:
      InputError: if no format holds the model.
    """
    if not config.moe_layers:
        write_hf_config(config)
        return config
    family = family_named(config.family)
    if family.holds_experts:
        held = _in_form_of(config, family, replicate_dense=replicate_dense)
        write_hf_config(held)
        return held
    refusals: list[_Refusal] = []
    for name in family.moe_formats:
        try:
            held = _in_form_of(config, family_named(name), replicate_dense=replicate_dense)
        except InputError as error:
            refusals.append(_Refusal(name, [str(error)], far=True))
            continue
        lost = inexpressible(held)
        if not lost:
            return held
        refusals.append(_Refusal(name, lost, far=False))
    raise InputError(
        f"a {family.name!r} model with such MoE layers has no Hugging Face format that would give the same logits; "
        f"keep it as a model directory{_nearest(refusals)}"
    )


class _Refusal(NamedTuple):
    """The reasons why a format cannot hold a model; `far`: not even the conversion to its form was possible."""

    name: str
    why: list[str]
    far: bool


def _nearest(refusals: Sequence[_Refusal]) -> str:
    """Returns the reasons of the format that would lose least."""
    if not refusals:
        return ""
    nearest = min(refusals, key=lambda refusal: (refusal.far, len(refusal.why)))
    more = f" (and {len(nearest.why) - 1} more)" if len(nearest.why) > 1 else ""
    return f". The nearest is that of {nearest.name!r}: {nearest.why[0]}{more}"


def _in_form_of(config: ModelConfig, family: Family, *, replicate_dense: bool) -> ModelConfig:
    """Converts the model to the form of a format, if possible.

    Raises:
      InputError: if dense layers would have to become MoEs and cannot, or must not.
    """
    moes = [config.moe(i) for i in config.moe_layers]
    dense = [] if family.holds_dense_layers else [i for i in range(config.num_layers) if i not in config.moe_layers]
    if dense and not replicate_dense:
        raise InputError(
            f"the format of {family.name!r} needs an MoE in every layer, but {len(dense)} of {config.num_layers} "
            "are dense; --dense-layers replicate stores such a layer as equal experts, with the same logits"
        )
    width = max([*(moe.expert.dim for moe in moes), *(config.ffn(i).dim for i in dense)])
    beside = [moe.universal_ffn.dim for moe in moes if moe.universal != "none"]
    layers = [_expressed(layer, family, width, max(beside, default=NARROWEST)) for layer in config.layers]
    held = replace(config, family=family.name, layers=tuple(layers))
    if family.name != config.family:
        # Keys of the old format could mean something in the new one; `auto_map` names code, which must not be run for
        # it.
        kept = {key: value for key, value in config.foreign.items() if is_harmless(key, value) and key != "auto_map"}
        held = replace(held, foreign=kept)
    return replace(held, layers=_replicated(held, dense, width)) if dense else held


def _expressed(layer: LayerConfig, family: Family, width: int, beside: int) -> LayerConfig:
    """Returns a layer with full experts and a universal FFN beside them, as Hugging Face formats can express it."""
    if not isinstance(layer.mlp, MoEConfig):
        return layer
    mlp = layer.mlp
    universal = "one" if mlp.universal == "med" else mlp.universal
    if family.universal is not None and universal in ("none", "one"):
        # An FFN of zeros; or one of half the output, as the sigmoid of 0 is 1/2.
        universal = family.universal
    weighting = "softmax_topk" if mlp.weighting == "top1" else mlp.weighting
    said = replace(
        mlp,
        expert=replace(mlp.expert, dim=width),
        gate=mlp.gate if universal == "coder" else weighting,
        bank=BankConfig(),
        merged_experts=None,
        universal=universal,
        universal_dim=None if universal == "none" else beside,
        extended=False,
    )
    return replace(layer, mlp=said)


def _replicated(config: ModelConfig, dense: Sequence[int], width: int) -> tuple[LayerConfig, ...]:
    """Returns the layers with MoEs of equal experts in place of dense FFNs."""
    layers, like = list(config.layers), config.moe(config.moe_layers[0])
    if not GATES[like.gate].weights_sum_to_one or like.gate_scale != 1.0 or like.universal != "none":
        raise InputError(
            f"the format of {config.family!r} needs an MoE in every layer, and dense layers can be equal experts only "
            "where weights sum to 1"
        )
    for i in dense:
        if replace(config.ffn(i), dim=width) != like.expert:
            raise InputError(
                f"layer {i} has the FFN {config.ffn(i)}, the experts are {like.expert}; "
                f"the format of {config.family!r} has one kind for both"
            )
        layers[i] = replace(layers[i], mlp=like)
    return tuple(layers)
