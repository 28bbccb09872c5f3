"""Hidden states of gated low-rank experts, which never leave fast memory; see `functional.low_rank_hidden`.

For a block of tokens, blocks of the hidden layer pass by: products with the base, second factors of `gate` and `up`,
and first ones of `down`. Of each block the hidden states of every choice are made in float32, multiplied with the first
factors of `down`, whose sums stay in fast memory until the last block, and added up by weight, which is written.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.kernels.tpu.chip import ANY_CORE, LANES, RESERVED, Core, block_bytes, round_up
from moe_jax.kernels.tpu.gated_activation import activated
from moe_jax.kernels.tpu.pieces import COLUMNS, dot, in_pieces

if TYPE_CHECKING:
    from moe_jax.functional.low_rank_hidden import Projection

# Blocks of tokens from the longest: for each, the factors are read again.
_TOKEN_BLOCKS = (1024, 512, 256, 128)
# Of a block of the hidden layer, from the widest.
_WIDTHS = (512, 384, 256, 128)
_STRIP = 256
_SUMS = jnp.dtype(jnp.float32)


def fits(features: int, top_k: int, size: int, dtype: DTypeLike, core: Core = ANY_CORE) -> bool:
    """Whether there are blocks of hidden states of that shape that the kernel can work with.

    Args:
      features: f, of the hidden layer.
      top_k: experts per token.
      size: E r, of the factors of all experts.
      dtype: of the activations.
      core: see `low_rank_hidden`.
    """
    return next(_blocks(_TOKEN_BLOCKS[0], features, top_k, size, dtype, core), None) is not None


def low_rank_hidden(
    gate: "Projection",
    up: "Projection",
    a: Float[Array, "f n"],
    weights: Float[Array, "T k"],
    activation: str,
    *,
    core: Core = ANY_CORE,
    interpret: bool = False,
) -> tuple[Float[Array, "T f"], Float[Array, "T k n"]]:
    """The weighted sums of the hidden states, and their products with `a`; see `functional.low_rank_hidden`.

    Args:
      gate, up, a, weights, activation: see there.
      core: for which the sizes of blocks are chosen; they must exist (`fits`).
      interpret: run the kernel in interpret mode.
    """
    tokens, features = gate.of_base.shape
    top_k, size, dtype = weights.shape[1], a.shape[1], gate.of_base.dtype
    rows, width, vmem = next(_blocks(tokens, features, top_k, size, dtype, core))
    hidden_block = pl.BlockSpec((rows, width), lambda t, n: (t, n))
    # Choice by choice: where the k rows of a token lie side by side, a TPU pads them to eight.
    inner_block = pl.BlockSpec((top_k, rows, size), lambda t, n: (0, t, 0))
    b_block = pl.BlockSpec((size, width), lambda t, n: (0, n))
    summed, inner = pl.pallas_call(
        partial(_kernel, activation=activation),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, features), dtype),
            jax.ShapeDtypeStruct((top_k, tokens, size), jnp.float32),
        ),
        grid=(pl.cdiv(tokens, rows), features // width),
        in_specs=[
            *[hidden_block, inner_block, b_block] * 2,
            pl.BlockSpec((width, size), lambda t, n: (n, 0)),
            pl.BlockSpec((rows, top_k), lambda t, n: (t, 0)),
        ],
        out_specs=(hidden_block, inner_block),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem + RESERVED
        ),
        cost_estimate=pl.CostEstimate(
            flops=6 * tokens * top_k * size * features,
            bytes_accessed=dtype.itemsize * (3 * tokens * features + pl.cdiv(tokens, rows) * 3 * size * features)
            + (2 * dtype.itemsize + 4) * tokens * top_k * size,
            transcendentals=tokens * top_k * features,
        ),
        interpret=interpret,
        name="low_rank_hidden",
    )(*_inputs(gate), *_inputs(up), a, weights)
    return summed, jnp.swapaxes(inner, 0, 1).astype(dtype)


def _inputs(projection: "Projection") -> tuple[Array, Array, Array]:
    return projection.of_base, jnp.swapaxes(projection.inner, 0, 1), projection.b


def _blocks(
    tokens: int, features: int, top_k: int, size: int, dtype: DTypeLike, core: Core
) -> Iterator[tuple[int, int, int]]:
    """Tokens of a block, its width, and the bytes of fast memory that it takes: those that fit, the best first."""
    dtype = jnp.dtype(dtype)
    for most in _TOKEN_BLOCKS:
        rows = min(most, round_up(tokens, min(_STRIP, 32 // dtype.itemsize if tokens < _STRIP else _STRIP)))
        for width in _WIDTHS:
            if features % width:
                continue
            once = 3 * block_bytes((rows, width), dtype) + 2 * block_bytes((top_k, rows, size), dtype)
            once += block_bytes((top_k, rows, size), _SUMS) + block_bytes((rows, LANES), _SUMS)
            once += 2 * block_bytes((size, width), dtype) + block_bytes((width, size), dtype)
            # All twice, as the next block arrives meanwhile; and what is made of a strip, in float32.
            vmem = 2 * once + 8 * 4 * min(rows, _STRIP) * max(COLUMNS, size)
            if vmem + RESERVED <= core.vmem:
                yield rows, width, vmem


# ---- the kernel -------------------------------------------------------------------------------------------------


def _kernel(
    gate_ref: Any,
    gate_inner_ref: Any,
    gate_b_ref: Any,
    up_ref: Any,
    up_inner_ref: Any,
    up_b_ref: Any,
    a_ref: Any,
    weights_ref: Any,
    summed_ref: Any,
    inner_ref: Any,
    *,
    activation: str,
) -> None:
    (top_k, rows, _), (_, width) = inner_ref.shape, summed_ref.shape

    @pl.when(pl.program_id(1) == 0)
    def _clear() -> None:
        inner_ref[...] = jnp.zeros_like(inner_ref)

    def strip(row: Any, count: int) -> None:
        own = pl.ds(row, count)

        def piece(column: Any, columns: int) -> None:
            at = own, pl.ds(column, columns)
            weights = weights_ref[own, :]

            def choice(j: int) -> Float[Array, "m n"]:
                """The hidden state of a choice, whose products with `a` are added to the sums."""
                gate = gate_ref[at].astype(jnp.float32) + dot(gate_inner_ref[j, own, :], gate_b_ref[:, at[1]], (1, 0))
                up = up_ref[at].astype(jnp.float32) + dot(up_inner_ref[j, own, :], up_b_ref[:, at[1]], (1, 0))
                h = activated(gate, activation) * up
                inner_ref[j, own, :] += dot(h.astype(a_ref.dtype), a_ref[at[1], :], (1, 0))
                return h

            # As `functional.dispatch.weighted_sum`: to the last bit the hidden state, if all are equal.
            first = choice(0)
            total = jnp.sum(weights, axis=1, keepdims=True) * first
            for j in range(1, top_k):
                total = total + weights[:, j : j + 1] * (choice(j) - first)
            summed_ref[at] = total.astype(summed_ref.dtype)

        in_pieces(width, COLUMNS, piece)

    in_pieces(rows, _STRIP, strip)
