"""Makes experts that are not plain copies of a dense FFN: pieces of it, with noise, with neurons drawn anew.

What is computed is in methods.md 2.6. One leaf is in memory at a time; its experts are made in float32, one after the
other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from moe_jax.core.draws import DROPPED, NOISE, REDRAWN, draw_positions, stream
from moe_jax.core.errors import InputError
from moe_jax.functional.routing.gates import GATES
from moe_jax.models import MoEConfig
from moe_jax.upcycling.start import Start

MATRICES = ("gate", "up", "down")

Kernel = Float[np.ndarray, "i o"]
Leaf = Float[np.ndarray, "..."]


def changed_leaves(
    ffns: Sequence[Mapping[str, np.ndarray]], moe: MoEConfig, start: Start, *, seed: int, layer: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields kernels [E, in, out] and biases [E, out] of experts that begin as `start` says.

    Args:
      ffns: leaves of dense FFNs by path below `mlp`, `up/kernel` and so on: one for every copy, or one for all of them.
      moe: the layer to make, of full experts; with granularity G, those of one copy are G consecutive ones.
      start: what is done to the copies.
      seed: of all draws.
      layer: index of the layer; different layers draw differently.

    Yields:
      Paths below `experts` and leaves, in the dtypes of the first FFN.

    Raises:
      InputError: if the spread of a kernel is not finite, so that nothing can be drawn like it.
    """
    pieces = start.granularity
    scale = output_scale(moe.gate, moe.num_experts, moe.top_k, pieces)
    for path, first in ffns[0].items():
        name, kind = path.split("/")
        leaf: np.ndarray | None = None
        for copy in range(moe.num_experts // pieces):
            dense = first if len(ffns) == 1 else ffns[copy][path]
            for index in range(pieces):
                expert = copy * pieces + index
                made = piece_of(dense, path, index, pieces, scale).astype(np.float32)
                if kind == "kernel":
                    made = _changed(made, name, start, seed, layer, expert)
                leaf = np.empty((moe.num_experts, *made.shape), first.dtype) if leaf is None else leaf
                leaf[expert] = made
        assert leaf is not None
        yield path, leaf


def output_scale(gate: str, num_experts: int, top_k: int, granularity: int) -> float:
    """What the down kernels of the pieces of an FFN are multiplied by, so that a token's experts add up to the FFN.

    He et al. 2024 (arXiv 2410.07524) scale by `E G^2 / T` for a softmax over all `E G` experts of which T are chosen,
    E the number of copies (`num_experts` is `E G` here, `top_k` is T): each chosen one then has a weight of about
    `1 / (E G)`, and `T / G` of them hold the same piece. (They spread the factor over the matrices of the FFN; here it
    is in the last one, in which every FFN is linear. How they spread it over gated FFNs we are not sure of.) Where
    weights are made to sum to 1, each is about `1 / T`, and the same argument gives G, which is exact: pieces of a copy
    have equal weights.
    """
    if granularity == 1:
        return 1.0
    if GATES[gate].weights_sum_to_one:
        return float(granularity)
    return num_experts * granularity / top_k


def piece_of(leaf: Leaf, path: str, index: int, pieces: int, scale: float) -> Leaf:
    """A piece of a dense FFN's leaf: that of consecutive neurons, `scale` times as large where outputs are made of it.

    The bias of the output belongs to no neuron. Every piece has all of it, `scale / pieces` times as large: weights
    of the experts sum to `pieces / scale`.
    """
    if path == "down/bias":
        return leaf if scale == pieces else leaf * np.float32(scale / pieces)
    neurons = 0 if path == "down/kernel" else -1
    width = leaf.shape[neurons] // pieces
    at = slice(index * width, (index + 1) * width)
    if neurons:
        return leaf[..., at]
    return leaf[at] if scale == 1 else leaf[at] * np.float32(scale)


def _changed(kernel: Kernel, name: str, start: Start, seed: int, layer: int, expert: int) -> Kernel:
    """The kernel of an expert with noise, and with neurons drawn anew: that comes last, and is drawn without noise."""
    changed, key = kernel, (MATRICES.index(name), expert)
    if start.noise:
        changed = with_noise(kernel, start.noise, stream(seed, layer, NOISE, *key))
    if start.drop:
        # Of one expert the same neurons in all matrices, so that the matrix is not part of the key.
        of_neurons = stream(seed, layer, DROPPED, expert)
        neurons = dropped_neurons(of_neurons, kernel.shape[name != "down"], start.drop)
        changed = redrawn(kernel, changed, name, neurons, stream(seed, layer, REDRAWN, *key))
    return changed


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
