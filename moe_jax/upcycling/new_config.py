"""The config of the MoE that upcycling makes of a dense model (methods.md 2, 6)."""

import dataclasses
import math
from collections.abc import Collection, Sequence

import numpy as np

from moe_jax.core.errors import InputError, raise_if_any
from moe_jax.experts.shapes import FFNConfig
from moe_jax.functional.routing import GATES
from moe_jax.model_io.tuned_base import is_tuned
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig
from moe_jax.upcycling.expert_leaves import output_scale
from moe_jax.upcycling.spec import DenseParameters, UpcycleSpec


def upcycled_config(dense: ModelConfig, spec: UpcycleSpec) -> ModelConfig:
    """Returns the config of the MoE made from a dense model.

    Args:
      dense: its layers are all dense.
      spec: the MoE to make.

    Returns:
      `dense` with the FFNs of the chosen layers replaced by MoEs whose experts have the FFN's shape or, with
      granularity G, a G-th of its neurons; and `spec.dense_parameters` in all layers.

    Raises:
      InputError: if the model already has MoE layers or adapters, or the options do not fit it; all problems are
        listed.
    """
    if dense.moe_layers:
        raise InputError(
            f"the model is an MoE already (layers {_some(dense.moe_layers)}); upcycling starts from a dense model"
        )
    if is_tuned(dense):
        raise InputError("the model has adapters or NF4 kernels already; merge them first, or upcycle its base")
    problems: list[str] = []
    chosen = _chosen_layers(dense, spec, problems)
    layers = list(dense.layers)
    # If no layer could be chosen, the first one is used to find problems with the MoE itself.
    for i in sorted(chosen) or [0]:
        try:
            layers[i] = dataclasses.replace(layers[i], mlp=_moe(dense, i, spec))
        except InputError as error:
            # Equal layers have equal problems, so one of them is checked.
            problems.append(str(error))
            break
    raise_if_any(problems, "these options do not go with the model")
    return with_rest(dataclasses.replace(dense, layers=tuple(layers)), spec.dense_parameters)


def keeps_the_function(spec: UpcycleSpec) -> bool:
    """Whether the weights of a token's FFNs sum to 1, so that equal ones add up to the dense FFN (methods.md 2.5)."""
    if spec.universal != "none":
        return spec.universal == "coder"
    if spec.weighting in GATES and GATES[spec.weighting].weights_sum_to_one:
        return True
    return spec.weighting in ("softmax_topk", "top1") and spec.top_k == spec.copies


def why_different(spec: UpcycleSpec, dtypes: Collection[np.dtype] = ()) -> str | None:
    """Returns why the MoE is not meant to begin with the dense model's logits; None: it is, if it `keeps_the_function`.

    The `dtypes` are those in which the FFN's down kernels are stored.
    """
    reasons = []
    if len(spec.experts_from):
        reasons.append(f"experts from {len(spec.experts_from)} models")
    if spec.noise:
        reasons.append(f"noise {spec.noise:g} on the experts")
    if spec.drop:
        reasons.append(f"share {spec.drop:g} of the experts' neurons drawn anew")
    if spec.granularity > 1:
        pieces = spec.granularity
        scale = output_scale(spec.weighting, spec.copies * pieces, spec.top_k * pieces, pieces)
        if not keeps_the_function(spec):
            reasons.append(f"outputs scaled by {scale:g}, as if the router found all experts alike")
        if math.frexp(scale)[0] != 0.5 and any(dtype != np.float32 for dtype in dtypes):
            reasons.append(f"down kernels times {scale:g} are rounded")
    return " and ".join(reasons) or None


def _chosen_layers(dense: ModelConfig, spec: UpcycleSpec, problems: list[str]) -> set[int]:
    num_layers = dense.num_layers
    if spec.layers is not None:
        outside = sorted(i for i in set(spec.layers) if not 0 <= i < num_layers)
        if not spec.layers:
            problems.append("no layers are named; name some, or use every")
        if outside:
            problems.append(f"layers {_some(outside)} do not exist; the model has layers 0 to {num_layers - 1}")
        return set(spec.layers) - set(outside)
    # An encoder's layers and a decoder's are counted apart.
    first = dense.num_encoder_layers
    most = max(first, num_layers - first)
    if not 1 <= spec.every_nth <= most:
        problems.append(f"every={spec.every_nth} must lie between 1 and the number of layers, {most}")
        return set()
    stacks = ((0, first), (first, num_layers))
    return {i for start, stop in stacks for i in range(start + spec.every_nth - 1, stop, spec.every_nth)}


def _moe(dense: ModelConfig, layer: int, spec: UpcycleSpec) -> MoEConfig:
    expert, pieces = dense.ffn(layer), spec.granularity
    if pieces > 1:
        problems = []
        if expert.dim % pieces:
            problems.append(f"granularity={pieces} does not divide the {expert.dim} neurons of the FFN")
        if spec.universal != "none":
            problems.append(f"granularity={pieces} does not go with a universal FFN, which weights whole experts")
        if spec.weighting not in ("topk_softmax", "softmax_topk"):
            gates = "'topk_softmax' or 'softmax_topk'"
            problems.append(f"granularity={pieces} goes with gate {gates}, not {spec.weighting!r}")
        raise_if_any(problems, f"layer {layer}")
    expert = dataclasses.replace(expert, dim=expert.dim // pieces)
    moe = MoEConfig(
        expert=expert,
        num_experts=spec.copies * pieces,
        top_k=spec.top_k * pieces,
        gate=spec.weighting,
        bank=spec.bank,
        balance_coef=spec.balance_coef,
        z_coef=spec.z_coef,
        cv_coef=spec.cv_coef,
        universal=spec.universal,
        extended=spec.extended,
    )
    spec.bank.check_fits(expert, dense.d_model)
    if not moe.router_learns:
        others = ", a universal FFN 'coder', or gate 'top1' or 'softmax_topk'"
        others = "" if spec.bank.form.needs_unit_weights else others
        raise InputError(
            f"top_k=1 with gate {spec.weighting!r} weights an expert by 1 whatever the router says, which then learns "
            f"nothing from the task; use top_k=2{others}"
        )
    return moe


def with_rest(config: ModelConfig, rest: DenseParameters) -> ModelConfig:
    """Returns the config with `rest` applied to attention and FFN (in an MoE, the experts' FFN) of every layer."""
    if rest.kind == "full":
        return config
    layers = tuple(_treated(layer, rest) for layer in config.layers)
    return dataclasses.replace(config, layers=layers, frozen_base=True)


def _treated(layer: LayerConfig, rest: DenseParameters) -> LayerConfig:
    nf4 = rest.kind == "qlora"
    attention = dataclasses.replace(layer.attention, nf4=nf4, lora=rest.lora(layer.attention.projections))

    def ffn(config: FFNConfig) -> FFNConfig:
        return dataclasses.replace(config, nf4=nf4, lora=rest.lora(config.matrices))

    mlp = layer.mlp
    changed = dataclasses.replace(mlp, expert=ffn(mlp.expert)) if isinstance(mlp, MoEConfig) else ffn(mlp)
    return dataclasses.replace(layer, attention=attention, mlp=changed)


def _some(layers: Sequence[int]) -> str:
    shown = ", ".join(map(str, layers[:4]))
    return shown if len(layers) <= 4 else f"{shown}, ..."
