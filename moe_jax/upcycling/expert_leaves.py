"""Makes the leaves of an MoE layer from those of a dense FFN, one at a time (methods.md 2.1-2.4, 2.6).

Experts are copies of the FFN, or pieces of it, with noise, or with neurons drawn anew. Changed experts are made in
float32, one after the other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from moe_jax.core.draws import DROPPED, NOISE, REDRAWN, ROUTER, draw_positions, draw_router, stream
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import path_name
from moe_jax.experts.on_host import leaves_from_dense
from moe_jax.functional.routing.gates import GATES
from moe_jax.models import MoEConfig
from moe_jax.models.own_parts import LINEAR, ROUTERS
from moe_jax.upcycling.spec import UpcycleSpec

MATRICES = ("gate", "up", "down")

Kernel = Float[np.ndarray, "i o"]
Leaf = Float[np.ndarray, "..."]
Leaves = Iterator[tuple[str, np.ndarray]]


def moe_leaves(
    ffn: Mapping[str, np.ndarray],
    moe: MoEConfig,
    spec: UpcycleSpec = UpcycleSpec(),
    *,
    layer: int,
    branches: Sequence[Mapping[str, np.ndarray]] = (),
    router: np.ndarray | None = None,
    router_bias: np.ndarray | None = None,
) -> Leaves:
    """Yields the leaves of an MoE layer whose experts, and universal FFN, compute what a dense FFN does.

    Args:
      ffn: leaves of the FFN by path below the layer's `mlp`: `up/kernel` [in, out], `up/bias` [out], ...
      moe: the layer to make; its experts have the FFN's shape.
      spec: the changes of the experts' copies of the FFN, and the seed of all draws.
      layer: index of the layer; different layers draw differently.
      branches: the FFNs that experts are copies of, one for every copy; none: all are copies of `ffn`.
      router: the initial kernel of a linear router, float32[d, copies]; None: it is drawn.
      router_bias: the initial bias of a linear router that has one; None: zeros.

    Yields:
      Paths below `mlp` and leaves in the dtypes of the FFN. A leaf that repeats the FFN's for every expert is a
      view with stride 0 along the experts, so that the only copy is the one that is written.

    Raises:
      InputError: if experts of this form cannot be the FFN.
    """
    yield from _router((branches[0] if branches else ffn)["up/kernel"], moe, spec, layer, router, router_bias)

    def streams(name: str, purpose: int, expert: int) -> np.random.Generator:
        return stream(spec.seed, layer, purpose, MATRICES.index(name), expert)

    if spec.copies_are_plain and not branches:
        kernels = {name: ffn[f"{name}/kernel"] for name in MATRICES if f"{name}/kernel" in ffn}
        for path, leaf in leaves_from_dense(moe.bank, moe.expert, moe.bank_experts, kernels, streams):
            yield f"experts/{path}", leaf
        for name in kernels:
            if f"{name}/bias" in ffn:
                bias = ffn[f"{name}/bias"]
                yield f"experts/{name}/bias", np.broadcast_to(bias, (moe.bank_experts, *bias.shape))
    else:
        for path, leaf in changed_leaves(branches or [ffn], moe, spec, layer=layer):
            yield f"experts/{path}", leaf
    if moe.universal_beside:
        for path, leaf in ffn.items():
            yield f"universal/{path}", leaf


def _router(
    up: np.ndarray,
    moe: MoEConfig,
    spec: UpcycleSpec,
    layer: int,
    given: np.ndarray | None,
    given_bias: np.ndarray | None,
) -> Leaves:
    """Yields the leaves of a linear router, of XFT's gate network, whose noise begins at zero, or of the user's own.

    Pieces of one copy of the FFN have equal columns (a virtual group), so that all of them are chosen or none.
    """
    if moe.router != LINEAR:
        yield from fresh_router(moe, up.shape[0], stream(spec.seed, layer, ROUTER), up.dtype)
        return
    d_model, num_experts = up.shape[0], moe.num_experts // spec.granularity
    first = draw_router(stream(spec.seed, layer, ROUTER), d_model, num_experts) if given is None else given
    first = first.astype(up.dtype)
    if moe.universal != "coder":
        yield "router/kernel", np.repeat(first, spec.granularity, axis=1)
        if moe.router_bias:
            yield (
                "router/bias",
                np.zeros(moe.num_experts, up.dtype) if given_bias is None else given_bias.astype(up.dtype),
            )
        return
    yield "router/hidden/kernel", first
    out = draw_router(stream(spec.seed, layer, ROUTER, 1), num_experts, num_experts)
    yield "router/out/kernel", out.astype(up.dtype)
    yield "router/noise/kernel", np.zeros_like(first)


def fresh_router(moe: MoEConfig, d_model: int, random: np.random.Generator, dtype: np.dtype) -> Leaves:
    """Yields the leaves of a new router that is the user's own, floating-point numbers in the given dtype."""
    make = ROUTERS[moe.router]
    assert make is not None
    rngs = nnx.Rngs(int(random.integers(2**31)))
    router = make(d_model, moe.num_experts, rngs=rngs, dtype=jnp.dtype(dtype))
    if isinstance(router, nnx.Module):
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(router)):
            leaf = np.asarray(leaf)
            yield f"router/{path_name(path)}", leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def changed_leaves(
    ffns: Sequence[Mapping[str, np.ndarray]], moe: MoEConfig, spec: UpcycleSpec, *, layer: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields kernels [E, in, out] and biases [E, out] of experts that are not plain copies of an FFN.

    There is an FFN for every copy, or one for all of them; the result has the dtypes of the first. With granularity G,
    the experts of one copy are G consecutive ones. A kernel whose spread is not finite, so that nothing can be drawn
    like it, is an `InputError`.
    """
    pieces = spec.granularity
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
                    made = _changed(made, name, spec, layer, expert)
                leaf = np.empty((moe.num_experts, *made.shape), first.dtype) if leaf is None else leaf
                leaf[expert] = made
        assert leaf is not None
        yield path, leaf


def output_scale(gate: str, num_experts: int, top_k: int, granularity: int) -> float:
    """Returns the factor for the down kernels of the pieces of an FFN, so that a token's experts add up to the FFN.

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
    """Returns the piece of a dense FFN's leaf for consecutive neurons; down kernels are multiplied by `scale`.

    The bias of the output belongs to no neuron. Every piece has all of it, `scale / pieces` times as large: weights of
    the experts sum to `pieces / scale`.
    """
    if path == "down/bias":
        return leaf if scale == pieces else leaf * np.float32(scale / pieces)
    neurons = 0 if path == "down/kernel" else -1
    width = leaf.shape[neurons] // pieces
    at = slice(index * width, (index + 1) * width)
    if neurons:
        return leaf[..., at]
    return leaf[at] if scale == 1 else leaf[at] * np.float32(scale)


def _changed(kernel: Kernel, name: str, spec: UpcycleSpec, layer: int, expert: int) -> Kernel:
    """Returns the kernel of an expert with noise, and then with neurons drawn anew, which are drawn without noise."""
    changed, key = kernel, (MATRICES.index(name), expert)
    if spec.noise:
        changed = with_noise(kernel, spec.noise, stream(spec.seed, layer, NOISE, *key))
    if spec.drop:
        # The same neurons in all matrices of an expert, so the matrix is not part of the key.
        of_neurons = stream(spec.seed, layer, DROPPED, expert)
        neurons = dropped_neurons(of_neurons, kernel.shape[name != "down"], spec.drop)
        changed = redrawn(kernel, changed, name, neurons, stream(spec.seed, layer, REDRAWN, *key))
    return changed


def with_noise(kernel: Kernel, relative: float, random: np.random.Generator) -> Kernel:
    """Returns the kernel plus Gaussian noise, whose standard deviation is `relative` times that of its entries."""
    _, deviation = _mean_and_deviation(kernel)
    noise = random.standard_normal(kernel.shape, np.float32)
    noise *= np.float32(relative * deviation)
    return noise + kernel


def dropped_neurons(random: np.random.Generator, count: int, share: float) -> Int[np.ndarray, " n"]:
    """Returns the neurons of an expert that are drawn anew: `floor(share * count)` of them, every set equally likely.

    The paper does not say how to round; we round down. One neuron more or less would not show in its results.
    """
    return draw_positions(random, count, math.floor(share * count + 1e-9))


def redrawn(
    kernel: Kernel, into: Kernel, name: str, neurons: Int[np.ndarray, " n"], random: np.random.Generator
) -> Kernel:
    """Returns `into` with the entries of some neurons drawn from the normal distribution of these entries in `kernel`.

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
    """Returns mean and standard deviation, summed in float64 without a float64 copy: a kernel can be large."""
    mean = float(np.sum(entries, dtype=np.float64)) / entries.size
    square = float(np.einsum("ij,ij->", entries, entries, dtype=np.float64)) / entries.size
    if not math.isfinite(square):
        raise InputError("a kernel has entries that are not finite, so that none can be drawn like them")
    return mean, math.sqrt(max(0.0, square - mean**2))
