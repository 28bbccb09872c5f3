"""`reap`: whole experts are removed, and what the router has for them (methods.md 5)."""

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Float

from moe_jax.compression.calibration.expert_statistics import expert_outputs, tokens_per_expert
from moe_jax.compression.coding.storage import REMOVED, AnyLayout
from moe_jax.compression.methods.expert_merging import count_groups
from moe_jax.compression.methods.interface import Analysis, Base, Method, Tick, check_calibrated
from moe_jax.compression.report import NO_BASE, LayerFigures, Measure
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.errors import InputError, check_member
from moe_jax.experts.forms.coding import check_keep
from moe_jax.models import MoEConfig

CRITERIA = ("reap", "frequency")

# Leaves beside the experts that have an entry for every expert, on the last axis.
_OF_ROUTER = ("router/kernel", "router/selection_bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class REAP(Method):
    """Whole experts removed, and their outputs of the router: those that add least on --calibrate.

    REAP (Lasby et al., 2025, arXiv 2510.13999). What stays is not changed by a bit, in whatever bank it is. An error is
    that of experts of which nothing is left.

    Attributes:
      keep: share of the experts that stays, in (0, 1]; not fewer than a token is routed to.
      criterion: `reap`: the norm of an expert's outputs times the router's weights, its mean over the tokens that are
        routed to it; `frequency`: the share of the tokens that are.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("keep", (0.5, 0.75))
    layouts: ClassVar[tuple[AnyLayout, ...]] = (REMOVED,)
    origin: ClassVar[str | None] = NO_BASE
    needs_calibration: ClassVar[bool] = True

    keep: float
    criterion: Literal["reap", "frequency"] = "reap"

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_member("criterion", self.criterion, CRITERIA)

    def check(self, layers: Sequence[SourceLayer]) -> None:
        for layer in layers:
            self._check(layer)
        check_calibrated(layers)

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """`kept`: the experts that stay, ascending; `saliency` of all."""
        began = time.monotonic()
        experts = layer.moe.num_experts
        saliency = (
            tokens_per_expert(layer)[:experts].astype(np.float64)
            if self.criterion == "frequency"
            else weighted_output_norms(layer, tick)
        )
        kept = np.sort(np.argsort(-saliency, kind="stable")[: count_groups(experts, self.keep)])
        return {"kept": kept, "saliency": saliency, "seconds": np.asarray(time.monotonic() - began)}

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        return {
            layer.index: dataclasses.replace(layer.moe, num_experts=count_groups(layer.moe.num_experts, self.keep))
            for layer in layers
        }

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        """Leaves are taken as they are stored: no expert is made anew."""
        began = time.monotonic()
        experts, kept = layer.moe.num_experts, analysis["kept"]
        # The universal FFN, if it is in the bank, is the last one there and stays.
        in_bank = np.append(kept, np.arange(experts, layer.moe.bank_experts))
        for path in layer.leaves:
            if path in _OF_ROUTER:
                write(path, np.ascontiguousarray(layer.leaf(path)[..., kept]))
            elif path.startswith("experts/") and not path.startswith("experts/base/"):
                leaf = layer.leaf(path)
                assert len(leaf) == layer.moe.bank_experts, (path, leaf.shape)
                write(path, leaf[in_bank])
        layer.forget()
        measure = Measure(experts, layer.moe.expert.dim)
        for name, shape in layer.shapes.items():
            for expert, kernel in enumerate(itertools.islice(layer.kernels(name), experts)):
                left = kernel.astype(np.float32) if expert in kept else np.zeros(shape, np.float32)
                measure.add(expert, kernel, None, left)
        removed = " ".join(str(expert) for expert in range(experts) if expert not in kept)
        return measure.figures(
            seconds=float(analysis["seconds"]) + time.monotonic() - began,
            choice=f"without {removed}" if removed else "all",
        )

    def _check(self, layer: SourceLayer) -> None:
        moe, where = layer.moe, f"layer {layer.index}"
        left = count_groups(moe.num_experts, self.keep)
        if layer.num_experts > moe.bank_experts:
            raise InputError("--extended does not go with this method, which makes no deltas")
        if moe.universal == "coder":
            raise InputError(f"{where}: universal 'coder' has a gate network, from which no expert can be removed")
        if moe.selection.groups > 1:
            raise InputError(
                f"{where}: experts are chosen by groups={moe.selection.groups}, and these would no longer be equal"
            )
        if moe.merged_experts is not None:
            raise InputError(f"{where}: its experts are merged, so that several outputs of the router share one")
        if left < moe.top_k:
            raise InputError(
                f"keep={self.keep:g} leaves {left} of {moe.num_experts} experts in {where}, where every token is "
                f"routed to top_k={moe.top_k}; keep at least {moe.top_k / moe.num_experts:g}"
            )


def weighted_output_norms(layer: SourceLayer, tick: Tick = lambda share: None) -> Float[np.ndarray, " E"]:
    """The mean of `w ||f(x)||` over the tokens that are routed to each expert; 0 of one to which none is."""
    rows = layer.rows
    assert rows is not None
    found = np.zeros(layer.moe.num_experts)
    for expert, outputs in enumerate(expert_outputs(layer)):
        tokens, choice = np.nonzero(rows.experts == expert)
        weights = rows.weights[tokens, choice].astype(np.float64)
        for part, given in outputs(tokens):
            found[expert] += weights[part] @ np.linalg.norm(given.astype(np.float64), axis=1)
        found[expert] /= max(len(tokens), 1)
        tick((expert + 1) / len(found))
    return found
