"""Initial parameters drawn with NumPy on the host, where model directories are made from others.

Each leaf (and each expert of a large leaf) has its own Philox stream: the same seed gives the same bits on any machine
and mesh, whatever else is drawn.
"""

import math

import numpy as np

from moe_jax.experts.bank import INIT_STD


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
