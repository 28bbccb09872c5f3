"""Hidden states of gated low-rank experts, which never leave fast memory; see `functional.gated`.

For a block of tokens, blocks of the hidden layer pass by: products with the base, second factors of `gate` and `up`,
and first factors of `down`. For each block the kernel computes the hidden states of every choice in float32, and writes
their weighted sum. It also adds up their products with the first factors of `down`, which stay in fast memory until the
last block. Entries for other experts' factors are set to zero there, too, so that there is one row per token.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.kernels.hardware import ANY_CORE, LANES, RESERVED, Core, block_bytes, round_up
from moe_jax.kernels.plain import activated, gated_factor
from moe_jax.kernels.tpu.parts import COLUMNS, dot, in_pieces

if TYPE_CHECKING:
    from moe_jax.functional.gated import Projection
    from moe_jax.functional.routing.token_choices import Routing

# Tokens of a block, from the longest.
_TOKEN_BLOCKS = (1024, 512, 256, 128)
# Columns of a block of the hidden layer, from the widest.
_WIDTHS = (1024, 768, 512, 384, 256, 128)
_STRIP = 256
_SUMS = jnp.dtype(jnp.float32)


def fits(features: int, size: int, dtype: DTypeLike, core: Core = ANY_CORE) -> bool:
    """Whether the kernel has blocks that fit hidden states of this shape.

    Args:
      features: f, of the hidden layer.
      size: E r, of the factors of all experts.
      dtype: of the activations.
      core: see `low_rank_hidden`.
    """
    return next(_blocks(_TOKEN_BLOCKS[0], features, size, dtype, core), None) is not None


def low_rank_hidden(
    gate: "Projection",
    up: "Projection",
    a: Float[Array, "f n"],
    routing: "Routing",
    num_experts: int,
    activation: str,
    *,
    core: Core = ANY_CORE,
    interpret: bool = False,
) -> tuple[Float[Array, "T f"], Float[Array, "T n"]]:
    """Returns the weighted sums of the hidden states, and of their products with `a`.

    Args:
      gate, up, a, routing, num_experts, activation: see `functional.gated.low_rank_hidden`; `gate`
        and `up` have as many factors as `a`.
      core: the core for which the sizes of blocks are chosen; they must exist (`fits`).
      interpret: run the kernel in interpret mode.
    """
    tokens, features = gate.of_base.shape
    top_k, size, dtype = routing.experts.shape[1], a.shape[1], gate.of_base.dtype
    rows, width, vmem = next(_blocks(tokens, features, size, dtype, core))
    hidden_block = pl.BlockSpec((rows, width), lambda t, n: (t, n))
    inner_block = pl.BlockSpec((rows, size), lambda t, n: (t, 0))
    b_block = pl.BlockSpec((size, width), lambda t, n: (0, n))
    choice_block = pl.BlockSpec((rows, top_k), lambda t, n: (t, 0))
    return pl.pallas_call(
        partial(_kernel, rank=size // num_experts, activation=activation),
        out_shape=(jax.ShapeDtypeStruct((tokens, features), dtype), jax.ShapeDtypeStruct((tokens, size), jnp.float32)),
        grid=(pl.cdiv(tokens, rows), features // width),
        in_specs=[
            *[hidden_block, inner_block, b_block] * 2,
            pl.BlockSpec((width, size), lambda t, n: (n, 0)),
            choice_block,
            choice_block,
        ],
        out_specs=(hidden_block, inner_block),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem + RESERVED
        ),
        cost_estimate=pl.CostEstimate(
            flops=6 * tokens * top_k * size * features,
            bytes_accessed=dtype.itemsize * 3 * features * (tokens + _readings(tokens, features, rows, width) * size)
            + (2 * dtype.itemsize + 4) * tokens * size
            + 8 * tokens * top_k,
            transcendentals=tokens * top_k * features,
        ),
        interpret=interpret,
        name="low_rank_hidden",
    )(*gate, *up, a, *routing)


def _blocks(tokens: int, features: int, size: int, dtype: DTypeLike, core: Core) -> Iterator[tuple[int, int, int]]:
    """Yields tokens, width and bytes of fast memory of the blocks that fit, the best first."""
    dtype = jnp.dtype(dtype)
    step = min(_STRIP, 32 // dtype.itemsize) if tokens < _STRIP else _STRIP
    widths = [width for width in _WIDTHS if features % width == 0]
    blocks = [(min(most, round_up(tokens, step)), width) for most in _TOKEN_BLOCKS for width in widths]
    for rows, width in sorted(blocks, key=lambda block: _readings(tokens, features, *block)):
        once = 3 * block_bytes((rows, width), dtype) + 2 * block_bytes((rows, size), dtype)
        once += block_bytes((rows, size), _SUMS) + 2 * block_bytes((rows, LANES), _SUMS)
        once += 2 * block_bytes((size, width), dtype) + block_bytes((width, size), dtype)
        # Blocks count twice, as the next one arrives meanwhile; then the float32 values of a strip.
        vmem = 2 * once + 8 * 4 * min(rows, _STRIP) * max(COLUMNS, size)
        if vmem + RESERVED <= core.vmem:
            yield rows, width, vmem


def _readings(tokens: int, features: int, rows: int, width: int) -> int:
    """Returns how often the factors are read: once per block of tokens, or once if the hidden layer is one block."""
    return 1 if width == features else pl.cdiv(tokens, rows)


# ---- the kernel -------------------------------------------------------------------------------------------------


def _kernel(*refs: Any, rank: int, activation: str) -> None:
    gate_refs, up_refs, (a_ref, experts_ref, weights_ref, summed_ref, inner_ref) = refs[:3], refs[3:6], refs[6:]
    (rows, size), (_, width), top_k = inner_ref.shape, summed_ref.shape, weights_ref.shape[1]

    @pl.when(pl.program_id(1) == 0)
    def _clear() -> None:
        inner_ref[...] = jnp.zeros_like(inner_ref)

    def strip(row: Any, count: int) -> None:
        own = pl.ds(row, count)

        def piece(column: Any, columns: int) -> None:
            at = own, pl.ds(column, columns)
            weights, experts = weights_ref[own, :], experts_ref[own, :]
            factor = lax.broadcasted_iota(jnp.int32, (count, size), 1)

            def choice(j: int) -> Float[Array, "m n"]:
                """Returns the hidden state of a choice, and adds its products with `a` to the sums."""
                start = experts[:, j : j + 1] * rank
                is_own = jnp.logical_and(factor >= start, factor < start + rank)

                def product(of_base: Any, inner: Any, b: Any) -> Float[Array, "m n"]:
                    # Selected in float32, which the vector units of all chips have.
                    chosen = jnp.where(is_own, inner[own, :].astype(jnp.float32), 0.0).astype(inner.dtype)
                    return of_base[at].astype(jnp.float32) + dot(chosen, b[:, at[1]], (1, 0))

                h = activated(product(*gate_refs), activation)
                h = h * gated_factor(product(*up_refs), activation)
                products = dot(h.astype(a_ref.dtype), a_ref[at[1], :], (1, 0))
                inner_ref[own, :] += jnp.where(is_own, weights[:, j : j + 1] * products, 0.0)
                return h

            # As in `functional.token_dispatch.weighted_sum`: equal hidden states give that state to the last bit.
            first = choice(0)
            total = jnp.sum(weights, axis=1, keepdims=True) * first
            for j in range(1, top_k):
                total = total + weights[:, j : j + 1] * (choice(j) - first)
            summed_ref[at] = total.astype(summed_ref.dtype)

        in_pieces(width, COLUMNS, piece)

    in_pieces(rows, _STRIP, strip)
