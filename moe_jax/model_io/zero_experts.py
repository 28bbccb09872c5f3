"""Finds experts whose weights are all zero: no error, but seldom intended, so users are told."""

import re
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from moe_jax.core.finite import largest_magnitude

_KERNEL = re.compile(r"layers/(\d+)/mlp/experts/(?:gate|up|down)/kernel")


class ZeroExperts:
    """Collects zero experts of banks with full kernels, leaf by leaf. For other experts it reads only a few numbers."""

    def __init__(self) -> None:
        self._zero: dict[int, set[int]] = {}

    @staticmethod
    def concerns(path: str) -> bool:
        """Whether `add` looks at the leaf at a path."""
        return _KERNEL.fullmatch(path) is not None

    def add(self, path: str, leaf: np.ndarray) -> None:
        """Looks for experts with only zeros in a leaf.

        Args:
          path: path of any leaf.
          leaf: the leaf; [E, in, out] for a kernel.
        """
        match = _KERNEL.fullmatch(path)
        if not match:
            return
        zero = {e for e, kernel in enumerate(leaf) if not (largest_magnitude(kernel[:1]) or largest_magnitude(kernel))}
        layer = int(match[1])
        self._zero[layer] = self._zero.get(layer, zero) & zero

    @property
    def found(self) -> list[tuple[int, list[int]]]:
        """Returns for each layer whose kernels were added the experts that had only zeros in all of them."""
        return [(layer, sorted(experts)) for layer, experts in self._zero.items()]

    @classmethod
    def joined(cls, found: Iterable[Iterable[tuple[int, Iterable[int]]]]) -> "ZeroExperts":
        """Joins the results of `found` from several processes."""
        joined = cls()
        for layer, experts in (item for one in found for item in one):
            joined._zero[layer] = joined._zero.get(layer, set(experts)) & set(experts)
        return joined

    @property
    def by_layer(self) -> dict[int, list[int]]:
        """Experts whose kernels are all zero, by layer; layers without any are left out."""
        return {layer: sorted(experts) for layer, experts in sorted(self._zero.items()) if experts}


def zero_experts_line(by_layer: Mapping[int, Collection[int]]) -> str:
    """Returns one line about the zero experts.

    Args:
      by_layer: the experts, by layer; not empty.
    """
    shown = [f"layer {layer}: {_listed(experts)}" for layer, experts in list(by_layer.items())[:8]]
    shown += [f"and in {len(by_layer) - 8} layers more"] if len(by_layer) > 8 else []
    count = sum(map(len, by_layer.values()))
    return f"{count} {'expert has' if count == 1 else 'experts have'} only zeros as weights ({'; '.join(shown)})"


def _listed(experts: Collection[int]) -> str:
    first = ", ".join(map(str, sorted(experts)[:8]))
    return f"{first} and {len(experts) - 8} more" if len(experts) > 8 else first
