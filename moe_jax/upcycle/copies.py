"""Makes experts that differ from the dense FFN: with noise, and with neurons drawn anew (methods.md 2.6).

One leaf is in memory at a time, and the experts are made in float32, one after the other.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Float, Int

from moe_jax.draws import DROPPED, NOISE, REDRAWN, draw_positions, stream
from moe_jax.errors import InputError
from moe_jax.models import MoEConfig
from moe_jax.upcycle.start import Start

MATRICES = ("gate", "up", "down")

Kernel = Float[np.ndarray, "i o"]


def changed_kernels(
    ffn: Mapping[str, np.ndarray], moe: MoEConfig, start: Start, *, seed: int, layer: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the kernels [E, in, out] of experts that begin as `start` says.

    Args:
      ffn: leaves of the dense FFN by path below `mlp`.
      moe: the layer to make; its experts are full.
      start: what is done to the copies.
      seed: of all draws.
      layer: index of the layer; different layers draw differently.

    Yields:
      Paths below `experts` and leaves, in the dtypes of the FFN.

    Raises:
      InputError: if the spread of a kernel is not finite, so that nothing can be drawn like it.
    """
    for index, name in enumerate(MATRICES):
        if f"{name}/kernel" not in ffn:
            continue
        dense = ffn[f"{name}/kernel"]
        leaf = np.empty((moe.num_experts, *dense.shape), dense.dtype)
        for expert in range(moe.num_experts):
            key = (index, expert)
            kernel = dense.astype(np.float32)
            changed = kernel
            if start.noise:
                changed = with_noise(kernel, start.noise, stream(seed, layer, NOISE, *key))
            if start.drop:
                # Of one expert the same neurons in all matrices, so that the matrix is not part of the key.
                of_neurons = stream(seed, layer, DROPPED, expert)
                neurons = dropped_neurons(of_neurons, kernel.shape[name != "down"], start.drop)
                changed = redrawn(kernel, changed, name, neurons, stream(seed, layer, REDRAWN, *key))
            leaf[expert] = changed
        yield f"{name}/kernel", leaf


def with_noise(kernel: Kernel, relative: float, random: np.random.Generator) -> Kernel:
    """The kernel with Gaussian noise whose standard deviation is that of the kernel's entries times `relative`."""
    _, deviation = _mean_and_deviation(kernel)
    noise = random.standard_normal(kernel.shape, np.float32)
    noise *= np.float32(relative * deviation)
    return noise + kernel


def dropped_neurons(random: np.random.Generator, count: int, share: float) -> Int[np.ndarray, " n"]:
    """The neurons of an expert that are drawn anew: `floor(share * count)` of them, every set equally likely.

    That it is rounded down is how we read the paper; a neuron more or less is not told apart by its results.
    """
    return draw_positions(random, count, math.floor(share * count + 1e-9))


def redrawn(
    kernel: Kernel, into: Kernel, name: str, neurons: Int[np.ndarray, " n"], random: np.random.Generator
) -> Kernel:
    """`into` with the entries of some neurons drawn from the normal distribution of these entries in `kernel`.

    Mean and standard deviation are those of the dropped part of this matrix alone (Nakamura et al. 2025,
    arXiv 2502.19261, section 3). Biases, which the paper's models do not have, stay as they are.
    """
    if not neurons.size:
        return into
    at = (neurons, slice(None)) if name == "down" else (slice(None), neurons)
    part = kernel[at]
    mean, deviation = _mean_and_deviation(part)
    drawn = random.standard_normal(part.shape, np.float32)
    drawn *= np.float32(deviation)
    drawn += np.float32(mean)
    into = into.copy() if into is kernel else into
    into[at] = drawn
    return into


def _mean_and_deviation(entries: Float[np.ndarray, "..."]) -> tuple[float, float]:
    """Added up in float64, but not copied to it: a kernel can be large."""
    mean = float(np.sum(entries, dtype=np.float64)) / entries.size
    square = float(np.einsum("ij,ij->", entries, entries, dtype=np.float64)) / entries.size
    if not math.isfinite(square):
        raise InputError("a kernel has entries that are not finite, so that none can be drawn like them")
    return mean, math.sqrt(max(0.0, square - mean**2))
