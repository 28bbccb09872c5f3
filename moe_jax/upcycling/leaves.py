"""Makes the leaves of an MoE layer from those of a dense FFN (methods.md 2.1-2.4), one at a time."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from moe_jax.core.draws import ROUTER, draw_router, stream
from moe_jax.core.errors import InputError
from moe_jax.experts.on_host import leaves_from_dense
from moe_jax.models import MoEConfig
from moe_jax.upcycling.copies import MATRICES, changed_leaves
from moe_jax.upcycling.start import PLAIN, Start

Leaves = Iterator[tuple[str, np.ndarray]]


def moe_leaves(
    ffn: Mapping[str, np.ndarray],
    moe: MoEConfig,
    *,
    seed: int,
    layer: int,
    start: Start = PLAIN,
    branches: Sequence[Mapping[str, np.ndarray]] = (),
    router: np.ndarray | None = None,
) -> Leaves:
    """Yields the leaves of an MoE layer whose experts, and universal FFN, compute what a dense FFN does.

    Args:
      ffn: leaves of the FFN by path below the layer's `mlp`: `up/kernel` [in, out], `up/bias` [out], ...
      moe: the layer to make; its experts have the FFN's shape.
      seed: of everything random.
      layer: index of the layer; different layers draw differently.
      start: what is done to the experts' copies of the FFN; with it they compute something else.
      branches: the FFNs that experts are copies of, one for every copy; none: all are of `ffn`.
      router: what a linear router begins as, float32[d, copies]; None: it is drawn.

    Yields:
      Paths below `mlp` and leaves in the dtypes of the FFN. A leaf that repeats the FFN's for every expert is a
      view with stride 0 along the experts, so that the only copy is the one that is written.

    Raises:
      InputError: for a negative seed, or if experts of this form cannot be the FFN.
    """
    if seed < 0:
        raise InputError(f"seed={seed} must not be negative")
    yield from _router((branches[0] if branches else ffn)["up/kernel"], moe, start, seed, layer, router)

    def streams(name: str, purpose: int, expert: int) -> np.random.Generator:
        return stream(seed, layer, purpose, MATRICES.index(name), expert)

    if start.copies and not branches:
        kernels = {name: ffn[f"{name}/kernel"] for name in MATRICES if f"{name}/kernel" in ffn}
        for path, leaf in leaves_from_dense(moe.bank, moe.expert, moe.bank_experts, kernels, streams):
            yield f"experts/{path}", leaf
        for name in kernels:
            if f"{name}/bias" in ffn:
                yield f"experts/{name}/bias", _repeat(ffn[f"{name}/bias"], moe.bank_experts)
    else:
        for path, leaf in changed_leaves(branches or [ffn], moe, start, seed=seed, layer=layer):
            yield f"experts/{path}", leaf
    if moe.universal_beside:
        for path, leaf in ffn.items():
            yield f"universal/{path}", leaf


def _router(up: np.ndarray, moe: MoEConfig, start: Start, seed: int, layer: int, given: np.ndarray | None) -> Leaves:
    """A linear router, or XFT's gate network, whose noise begins at zero.

    Pieces of one copy of the FFN have equal columns (a virtual group), so that all of them are chosen or none.
    """
    d_model, num_experts = up.shape[0], moe.num_experts // start.granularity
    first = draw_router(stream(seed, layer, ROUTER), d_model, num_experts) if given is None else given
    first = first.astype(up.dtype)
    if moe.universal != "coder":
        yield "router/kernel", np.repeat(first, start.granularity, axis=1)
        return
    yield "router/hidden/kernel", first
    yield "router/out/kernel", draw_router(stream(seed, layer, ROUTER, 1), num_experts, num_experts).astype(up.dtype)
    yield "router/noise/kernel", np.zeros_like(first)


def _repeat(leaf: np.ndarray, num_experts: int) -> np.ndarray:
    return np.broadcast_to(leaf, (num_experts, *leaf.shape))
