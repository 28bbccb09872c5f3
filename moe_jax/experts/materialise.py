"""Experts from the leaves of a bank on the host, one at a time: for merging, measuring and compressing.

A bank applies itself without ever making an expert; files are made from files, and no bank is built for that.
"""

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe_jax.experts.config import BankConfig
from moe_jax.experts.deltas import delta_form
from moe_jax.functional.deltas import DeltaForm

DELTA_LEAVES = {
    "low-rank": ("a", "b"),
    "sparse": ("columns", "row_ends", "values"),
    "quantized": ("codes", "scales"),
}


class Reader(Protocol):
    """Reads one leaf by its path."""

    def __call__(self, path: str, /) -> np.ndarray: ...


def expert_kernels(
    read: Reader, config: BankConfig, bank: str, name: str, *, dtype: np.dtype | None = None
) -> Iterator[np.ndarray]:
    """Yields the kernel `name` [in, out] of every expert of a bank.

    Memory holds the stored leaves of the matrix and one expert.

    Args:
      read: gives a leaf by its path.
      config: of the bank.
      bank: path of the bank, as in "layers/3/mlp/experts".
      name: `gate`, `up` or `down`.
      dtype: of kernels that are made of a base and a delta; None: that of the base. Full kernels are as stored.
    """
    if config.kind == "full":
        yield from read(f"{bank}/{name}/kernel")
        return
    base = read(f"{bank}/base/{name}/kernel")
    delta = {leaf: read(f"{bank}/delta/{name}/{leaf}") for leaf in DELTA_LEAVES[config.kind]}
    form = delta_form(config, base.shape)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for expert in range(next(iter(delta.values())).shape[0]):
            leaves = {leaf: array[expert] for leaf, array in delta.items()}
            yield np.asarray(_kernel(base, leaves, form=form, dtype=np.dtype(dtype or base.dtype)))


@partial(jax.jit, static_argnames=("form", "dtype"))
def _kernel(
    base: Float[Array, "i o"], leaves: dict[str, Array], form: DeltaForm, dtype: np.dtype
) -> Float[Array, "i o"]:
    return (base.astype(jnp.float32) + form.tile(leaves, 0, base.shape[1])).astype(dtype)
