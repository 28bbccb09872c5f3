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
from moe_jax.experts.deltas import NEURONS, delta_form, joint_factors
from moe_jax.experts.places import PLACES_LEAVES
from moe_jax.functional.deltas import DeltaForm


class Reader(Protocol):
    """Reads one leaf by its path."""

    def __call__(self, path: str, /) -> np.ndarray: ...


def delta_leaves(config: BankConfig, name: str) -> dict[str, str]:
    """Paths, below the bank, of what the deltas of a matrix are made from, by the names that forms give them.

    Of a joint low-rank delta these are `neurons` and `own`.
    """
    if config.kind == "joint-low-rank":
        return {"neurons": f"delta/{NEURONS}/factor", "own": f"delta/{name}/factor"}
    leaves: tuple[str, ...]
    if config.kind == "low-rank":
        leaves = ("a", "b")
    elif config.kind == "quantized":
        leaves = ("codes", "scales")
    else:
        values = ("values",) if config.bits is None else ("value_codes", "value_scales")
        leaves = PLACES_LEAVES[config.places] + values
    return {leaf: f"delta/{name}/{leaf}" for leaf in leaves}


def expert_kernels(
    read: Reader,
    config: BankConfig,
    bank: str,
    name: str,
    shape: tuple[int, int],
    *,
    dtype: np.dtype | None = None,
) -> Iterator[np.ndarray]:
    """Yields the kernel `name` [in, out] of every expert of a bank.

    Memory holds the stored leaves of the matrix and one expert.

    Args:
      read: gives a leaf by its path.
      config: of the bank.
      bank: path of the bank, as in "layers/3/mlp/experts".
      name: `gate`, `up` or `down`.
      shape: of the kernel.
      dtype: of kernels that are made of a base and a delta; None: that of the base, float32 without one. Full kernels
        are as stored.
    """
    if config.kind == "full":
        yield from read(f"{bank}/{name}/kernel")
        return
    base = read(f"{bank}/base/{name}/kernel") if config.has_base else np.zeros((1, 1), np.float32)
    delta = {leaf: read(f"{bank}/{path}") for leaf, path in delta_leaves(config, name).items()}
    form = delta_form(config, shape)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for expert in range(next(iter(delta.values())).shape[0]):
            leaves = {leaf: array[expert] for leaf, array in delta.items()}
            if "neurons" in leaves:
                leaves = joint_factors(name, **leaves)
            yield np.asarray(_kernel(base, leaves, form=form, dtype=np.dtype(dtype or base.dtype)))


@partial(jax.jit, static_argnames=("form", "dtype"))
def _kernel(
    base: Float[Array, "#i #o"], leaves: dict[str, Array], form: DeltaForm, dtype: np.dtype
) -> Float[Array, "i o"]:
    tile = form.tile(leaves, 0, form.shape[1])
    return (jnp.broadcast_to(base.astype(jnp.float32), tile.shape) + tile).astype(dtype)
