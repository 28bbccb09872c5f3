"""Prints how a Hugging Face format changes the way in which a model is stored; the model computes the same."""

import math
from collections.abc import Mapping

import jax
from rich.console import Console

from moe_jax.core.formatting import GB
from moe_jax.models import ModelConfig


def print_changes(
    before: ModelConfig, after: ModelConfig, specs: Mapping[str, jax.ShapeDtypeStruct], console: Console
) -> None:
    """Prints how the format changes the model: its family, and experts that are added, padded, repeated or replicated.

    Args:
      before: of the model.
      after: from `exported_config`.
      specs: shape and dtype of the leaves of the latter, by path.
      console: where to print.
    """
    if before.family != after.family:
        console.print(f"an upcycled {before.family!r} model: exporting in the format of {after.family!r}")
    narrow = [i for i in before.moe_layers if before.moe(i).expert.dim < after.moe(i).expert.dim]
    if narrow:
        console.print(
            f"the experts of {len(narrow)} layers get neurons of zeros: the format has one width for all layers, "
            f"{after.moe(narrow[0]).expert.dim}"
        )
    merged = [i for i in before.moe_layers if before.moe(i).merged_experts is not None]
    if merged:
        console.print(
            f"the merged experts of {len(merged)} layers are written once for every output of the router, "
            f"{after.moe(merged[0]).num_experts}, which the format needs"
        )
    dense = [i for i in range(before.num_layers) if i in after.moe_layers and i not in before.moe_layers]
    if dense:
        experts = after.moe(dense[0]).num_experts
        ffn = sum(
            math.prod(spec.shape) * spec.dtype.itemsize
            for path, spec in specs.items()
            if path.startswith(f"layers/{dense[0]}/mlp/experts/")
        )
        console.print(
            f"{len(dense)} dense layers become {experts} equal experts each, which the format needs: same logits, "
            f"{len(dense) * ffn / GB * (experts - 1) / experts:.3f} GB more (not with --dense-layers refuse)"
        )
    _print_universal(before, after, console)


def _print_universal(before: ModelConfig, after: ModelConfig, console: Console) -> None:
    changes: dict[str, list[int]] = {}
    for i in before.moe_layers:
        old, new = before.moe(i), after.moe(i)
        if new.universal == "none":
            continue
        if old.universal == "none":
            what = f"get a shared expert of zeros, {new.universal_ffn.dim} wide, which the format needs: same logits"
            changes.setdefault(what, []).append(i)
            continue
        if old.extended:
            changes.setdefault("have their universal FFN in the bank: it is merged and stands beside it", []).append(i)
        if old.universal != "sigmoid" and new.universal == "sigmoid":
            what = "have a universal FFN of weight 1, which is stored with weight 1/2 and twice its output: same logits"
            changes.setdefault(what, []).append(i)
        if old.universal_ffn.dim < new.universal_ffn.dim:
            what = f"have a universal FFN with neurons of zeros: the format has one width, {new.universal_ffn.dim}"
            changes.setdefault(what, []).append(i)
    for what, layers in changes.items():
        console.print(f"the MoEs of {len(layers)} layers {what}")
