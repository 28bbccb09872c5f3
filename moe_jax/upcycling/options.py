"""The options of upcycling, and the config of the MoE that it makes."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

from moe_jax.core.errors import InputError, check_member, raise_if_any
from moe_jax.experts import AdapterConfig, AdapterExperts, BankConfig
from moe_jax.experts.forms.by_name import form_of_option
from moe_jax.experts.layout.config import FFNConfig
from moe_jax.functional.routing.gates import GATES
from moe_jax.model_io.tuned_base import is_tuned
from moe_jax.models import ModelConfig, MoEConfig
from moe_jax.upcycling.copies import output_scale
from moe_jax.upcycling.rest import Rest, with_rest
from moe_jax.upcycling.start import PLAIN, Start


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpcycleOptions:
    """How a dense model becomes an MoE.

    Attributes:
      num_experts: E; where FFNs are cut into pieces (`start.granularity`), the number of copies that are.
      top_k: experts per token; or copies, all pieces of which are chosen at first.
      every: every `every`-th layer becomes an MoE: with 2, the layers 1, 3, 5, ... counted from 0; with 1, all
        layers.
      layers: indices (from 0) of the layers to turn into MoEs, instead of `every`.
      bank: the form of the experts.
      gate: how experts are weighted; one of `functional.routing.gates.GATES`. Not with a universal FFN.
      balance_coef, z_coef, cv_coef: coefficients of the auxiliary losses.
      universal: a copy of the FFN that sees every token beside the experts: `none`, `coder` or `med` (methods.md 2.4).
      extended: the universal FFN is one more delta over the base that the experts share.
      rest: how the dense model's own parameters are treated. Only adapter experts allow anything but `full`.
      start: what is done to the copies of the FFN before they are the experts.
    """

    num_experts: int = 8
    top_k: int = 2
    every: int = 2
    layers: tuple[int, ...] | None = None
    bank: BankConfig = BankConfig()
    gate: str = "topk_softmax"
    balance_coef: float = 0.01
    z_coef: float = 0.0
    cv_coef: float = 0.0
    universal: Literal["none", "coder", "med", "one", "sigmoid"] = "none"
    extended: bool = False
    rest: Rest = Rest()
    start: Start = PLAIN


PESC = UpcycleOptions(
    every=1,
    bank=BankConfig(AdapterExperts(adapter=AdapterConfig(rank=512, activation="gelu", scale=0.25, dropout=0.1))),
    rest=Rest(kind="qlora", rank=64),
)
"""PESC with the settings of the released Camelidae models (methods.md 6), to be changed with `dataclasses.replace`."""


def parse_delta(text: str, *, freeze_base: bool = False) -> BankConfig:
    """Reads `full`, `low-rank:R`, `sparse:RATE`, or what other forms say of themselves.

    Raises:
      InputError: for anything else, a number out of range, or a frozen base where there is none.
    """
    form = form_of_option(text)
    if freeze_base and not form.over_base:
        raise InputError(f"--freeze-base needs a shared base, and --delta {text} has none: its experts are copies")
    return BankConfig(form, train_base=not freeze_base)


def upcycled_config(dense: ModelConfig, options: UpcycleOptions) -> ModelConfig:
    """The config of the MoE made from a dense model.

    Args:
      dense: its layers are all dense.
      options: the MoE to make.

    Returns:
      `dense` with the FFNs of the chosen layers replaced by MoEs whose experts have the FFN's shape or, with
      granularity G, a G-th of its neurons; and `options.rest`
      in all layers.

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
    chosen = _chosen_layers(dense, options, problems)
    layers = list(dense.layers)
    # If no layer could be chosen, the first one is used to find problems with the MoE itself.
    for i in sorted(chosen) or [0]:
        try:
            layers[i] = dataclasses.replace(layers[i], mlp=_moe(dense, i, options))
        except InputError as error:
            # Equal layers have equal problems: one of them is enough.
            problems.append(str(error))
            break
    if options.rest.freezes and not options.bank.form.beside_base_model:
        problems.append(
            f"rest {options.rest.kind!r} freezes the dense model, and {options.bank.kind} experts are trained with it; "
            "use adapter experts (PESC), or rest 'full'"
        )
    if options.start.models and options.start.models != options.num_experts:
        problems.append(f"{options.start.models} models give one expert each, num_experts={options.num_experts}")
    if not options.bank.has_own_kernels:
        problems += options.start.needs_full_experts()
    raise_if_any(problems, "these options do not go with the model")
    return with_rest(dataclasses.replace(dense, layers=tuple(layers)), options.rest)


def keeps_the_function(options: UpcycleOptions) -> bool:
    """Whether the weights of a token's FFNs sum to 1, so that equal ones add up to the dense FFN (methods.md 2.5)."""
    if options.universal != "none":
        return options.universal == "coder"
    if options.gate in GATES and GATES[options.gate].weights_sum_to_one:
        return True
    return options.gate in ("softmax_topk", "top1") and options.top_k == options.num_experts


def why_different(options: UpcycleOptions, dtypes: Collection[np.dtype] = ()) -> str | None:
    """Why the MoE is not meant to begin with the dense model's logits; None: it is, if it `keeps_the_function`.

    Args:
      options: of the MoE.
      dtypes: in which the FFN's down kernels are stored.
    """
    start, reasons = options.start, []
    if start.models:
        reasons.append(f"experts from {start.models} models")
    if start.noise:
        reasons.append(f"noise {start.noise:g} on the experts")
    if start.drop:
        reasons.append(f"share {start.drop:g} of the experts' neurons drawn anew")
    if start.granularity > 1:
        scale = granular_scale(options)
        if not keeps_the_function(options):
            reasons.append(f"outputs scaled by {scale:g}, as if the router found all experts alike")
        if math.frexp(scale)[0] != 0.5 and any(dtype != np.float32 for dtype in dtypes):
            reasons.append(f"down kernels times {scale:g} are rounded")
    return " and ".join(reasons) or None


def prompt_problems(options: UpcycleOptions, prompts: int) -> list[str]:
    """Why routers cannot be made from so many texts."""
    problems = []
    if prompts != options.num_experts:
        what = "experts" if options.start.granularity == 1 else "copies of the FFN that are cut into experts"
        problems.append(f"--router-from has {prompts} texts for {options.num_experts} {what}; give one for each")
    if options.universal == "coder":
        problems.append("--router-from makes linear routers, and --universal coder has a gate network")
    if options.bank.form.beside_base_model:
        problems.append("--router-from does not go with adapter experts")
    return problems


def granular_scale(options: UpcycleOptions) -> float:
    """`output_scale` of the MoE that is made by these options."""
    pieces = options.start.granularity
    gate, experts, top_k = options.gate, options.num_experts * pieces, options.top_k * pieces
    return output_scale(gate, experts, top_k, pieces)


def _granular_problems(options: UpcycleOptions, expert: FFNConfig) -> list[str]:
    """Why an FFN cannot be cut into pieces that are experts."""
    pieces, problems = options.start.granularity, []
    if pieces == 1:
        return problems
    if expert.dim % pieces:
        problems.append(f"granularity={pieces} does not divide the {expert.dim} neurons of the FFN")
    if options.universal != "none":
        problems.append(f"granularity={pieces} does not go with a universal FFN, which weights whole experts")
    if options.gate not in ("topk_softmax", "softmax_topk"):
        problems.append(f"granularity={pieces} goes with gate 'topk_softmax' or 'softmax_topk', not {options.gate!r}")
    return problems


def _chosen_layers(dense: ModelConfig, options: UpcycleOptions, problems: list[str]) -> set[int]:
    num_layers = dense.num_layers
    if options.layers is not None:
        outside = sorted(i for i in set(options.layers) if not 0 <= i < num_layers)
        if not options.layers:
            problems.append("no layers are named; name some, or use every")
        if outside:
            problems.append(f"layers {_some(outside)} do not exist; the model has layers 0 to {num_layers - 1}")
        return set(options.layers) - set(outside)
    # An encoder's layers and a decoder's are counted apart.
    first = dense.num_encoder_layers
    most = max(first, num_layers - first)
    if not 1 <= options.every <= most:
        problems.append(f"every={options.every} must lie between 1 and the number of layers, {most}")
        return set()
    stacks = ((0, first), (first, num_layers))
    return {i for start, stop in stacks for i in range(start + options.every - 1, stop, options.every)}


def _moe(dense: ModelConfig, layer: int, options: UpcycleOptions) -> MoEConfig:
    check_member("universal", options.universal, ("none", "coder", "med"))
    expert, pieces = dense.ffn(layer), options.start.granularity
    raise_if_any(_granular_problems(options, expert), f"layer {layer}")
    expert = dataclasses.replace(expert, dim=expert.dim // pieces)
    moe = MoEConfig(
        expert=expert,
        num_experts=options.num_experts * pieces,
        top_k=options.top_k * pieces,
        gate=options.gate,
        bank=options.bank,
        balance_coef=options.balance_coef,
        z_coef=options.z_coef,
        cv_coef=options.cv_coef,
        universal=options.universal,
        extended=options.extended,
    )
    options.bank.check_fits(expert, dense.d_model)
    if not moe.router_learns:
        others = ", a universal FFN 'coder', or gate 'top1' or 'softmax_topk'"
        others = "" if options.bank.form.needs_unit_weights else others
        raise InputError(
            f"top_k=1 with gate {options.gate!r} weights an expert by 1 whatever the router says, which then learns "
            f"nothing from the task; use top_k=2{others}"
        )
    return moe


def _some(layers: Sequence[int]) -> str:
    shown = ", ".join(map(str, layers[:4]))
    return shown if len(layers) <= 4 else f"{shown}, ..."
