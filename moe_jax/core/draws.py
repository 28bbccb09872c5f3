"""Initial parameters drawn with NumPy on the host, where model directories are made from others.

Each leaf (and each expert of a large leaf) has its own Philox stream: the same seed gives the same bits on any machine
and mesh, whatever else is drawn.
"""

import math

import numpy as np

from moe_jax.core.errors import InputError

INIT_STD = 0.02
"""Standard deviation of fresh kernels."""

# What a stream of random numbers is for. Part of every stream's key: changing one changes what a seed gives.
ROUTER, FACTOR, POSITIONS, FRESH, NOISE, DROPPED, REDRAWN, COPIED = range(8)


def stream(seed: int, *key: int) -> np.random.Generator:
    """The stream of random numbers of a seed and a key. Keys must not change: old seeds would give other models."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


def draw_router(random: np.random.Generator, fan_in: int, num_experts: int) -> np.ndarray:
    """An initial router matrix: normal with standard deviation 0.02; float32[fan_in, E]."""
    return random.normal(0.0, INIT_STD, (fan_in, num_experts)).astype(np.float32)


def draw_factor(random: np.random.Generator, fan_in: int, rank: int) -> np.ndarray:
    """An initial `A` of a low-rank product, drawn as in LoRA: uniform in ±1/sqrt(fan_in); float32[fan_in, r]."""
    bound = 1 / math.sqrt(fan_in)
    return random.uniform(-bound, bound, (fan_in, rank)).astype(np.float32)


def draw_positions(random: np.random.Generator, size: int, count: int) -> np.ndarray:
    """Distinct positions in a kernel: `count` of `size`, every set equally likely, ascending; int32[count].

    Raises:
      InputError: if int32 cannot address the kernel.
    """
    if size > np.iinfo(np.int32).max:
        raise InputError(f"a kernel of {size} entries is too large for the int32 positions of a sparse delta")
    if size <= 10_000 or count <= size // 20:
        return np.sort(random.choice(size, count, replace=False, shuffle=False).astype(np.int32))
    # NumPy would permute the whole kernel now, which takes four times as long as this (measured on 4096 x 14336).
    if count > size // 2:
        kept = np.ones(size, bool)
        kept[draw_positions(random, size, size - count)] = False
        return np.flatnonzero(kept).astype(np.int32)
    # An independent draw for every position, with a few too many in all, of which the surplus is removed at random.
    margin = 6 * math.sqrt(count) + 6  # six standard deviations: once is nearly always enough
    share = np.float32(min(1.0, (count + margin) / size))
    positions = np.empty(0, np.int64)
    while positions.size < count:
        positions = np.flatnonzero(random.random(size, dtype=np.float32) < share)
    surplus = random.choice(positions.size, positions.size - count, replace=False, shuffle=False)
    return np.delete(positions, surplus).astype(np.int32)
