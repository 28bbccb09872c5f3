"""Makes the leaves of an MoE layer from those of a dense FFN (METHODS 2.1-2.4), one at a time."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from moe_jax.draws import draw_factor, draw_positions, draw_router, stream
from moe_jax.errors import InputError
from moe_jax.experts.places import columns_dtype, to_csr
from moe_jax.models import MoEConfig

# What a stream of random numbers is for. Part of every stream's key: changing one changes what a seed gives.
_ROUTER, _FACTOR, _POSITIONS = range(3)
MATRICES = ("gate", "up", "down")

Leaves = Iterator[tuple[str, np.ndarray]]


def moe_leaves(ffn: Mapping[str, np.ndarray], moe: MoEConfig, *, seed: int, layer: int) -> Leaves:
    """Yields the leaves of an MoE layer whose experts, and universal FFN, compute what a dense FFN does.

    Args:
      ffn: leaves of the FFN by path below the layer's `mlp`: `up/kernel` [in, out], `up/bias` [out], ...
      moe: the layer to make; its experts have the FFN's shape.
      seed: of everything random.
      layer: index of the layer; different layers draw differently.

    Yields:
      Paths below `mlp` and leaves in the dtypes of the FFN. A leaf that repeats the FFN's for every expert is a
      view with stride 0 along the experts, so that the only copy is the one that is written.

    Raises:
      InputError: for a negative seed.
    """
    if seed < 0:
        raise InputError(f"seed={seed} must not be negative")
    yield from _router(ffn["up/kernel"], moe, seed, layer)
    for index, name in enumerate(MATRICES):
        if f"{name}/kernel" not in ffn:
            continue
        yield from _KERNELS[moe.bank.kind](name, ffn[f"{name}/kernel"], moe, (seed, layer, index))
        if f"{name}/bias" in ffn:
            yield f"experts/{name}/bias", _repeat(ffn[f"{name}/bias"], moe.bank_experts)
    if moe.universal_beside:
        for path, leaf in ffn.items():
            yield f"universal/{path}", leaf


Draws = tuple[int, int, int]
"""Seed, layer, matrix."""


def _router(up: np.ndarray, moe: MoEConfig, seed: int, layer: int) -> Leaves:
    """A linear router, or XFT's gate network, whose noise begins at zero."""
    d_model, num_experts = up.shape[0], moe.num_experts
    first = draw_router(stream(seed, layer, _ROUTER), d_model, num_experts).astype(up.dtype)
    if moe.universal != "coder":
        yield "router/kernel", first
        return
    yield "router/hidden/kernel", first
    yield "router/out/kernel", draw_router(stream(seed, layer, _ROUTER, 1), num_experts, num_experts).astype(up.dtype)
    yield "router/noise/kernel", np.zeros_like(first)


def _full(name: str, kernel: np.ndarray, moe: MoEConfig, draws: Draws) -> Leaves:
    yield f"experts/{name}/kernel", _repeat(kernel, moe.bank_experts)


def _low_rank(name: str, kernel: np.ndarray, moe: MoEConfig, draws: Draws) -> Leaves:
    (fan_in, fan_out), rank, experts = kernel.shape, moe.bank.rank, moe.bank_experts
    a = np.empty((experts, fan_in, rank), kernel.dtype)
    for e in range(experts):
        a[e] = draw_factor(_expert_stream(draws, _FACTOR, e), fan_in, rank)
    yield f"experts/base/{name}/kernel", kernel
    yield f"experts/delta/{name}/a", a
    yield f"experts/delta/{name}/b", np.zeros((experts, rank, fan_out), kernel.dtype)


def _sparse(name: str, kernel: np.ndarray, moe: MoEConfig, draws: Draws) -> Leaves:
    count, experts = moe.bank.nonzeros(kernel.shape), moe.bank_experts
    columns = np.empty((experts, count), columns_dtype(kernel.shape))
    row_ends = np.empty((experts, kernel.shape[0]), np.int32)
    for e in range(experts):
        positions = draw_positions(_expert_stream(draws, _POSITIONS, e), kernel.size, count)
        columns[e], row_ends[e] = to_csr(positions, kernel.shape)
    yield f"experts/base/{name}/kernel", kernel
    yield f"experts/delta/{name}/columns", columns
    yield f"experts/delta/{name}/row_ends", row_ends
    yield f"experts/delta/{name}/values", np.zeros((experts, count), kernel.dtype)


_KERNELS: dict[str, Callable[[str, np.ndarray, MoEConfig, Draws], Leaves]] = {
    "full": _full,
    "low-rank": _low_rank,
    "sparse": _sparse,
}


def _repeat(leaf: np.ndarray, num_experts: int) -> np.ndarray:
    return np.broadcast_to(leaf, (num_experts, *leaf.shape))


def _expert_stream(draws: Draws, purpose: int, expert: int) -> np.random.Generator:
    seed, layer, matrix = draws
    return stream(seed, layer, purpose, matrix, expert)
