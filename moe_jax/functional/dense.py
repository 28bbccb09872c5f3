"""The parts of dense layers: products with one kernel, rows of a table, norms and FFNs."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.functional.few_rows.bfloat16_kernels import MOST_ROWS, product_of_few_rows
from moe_jax.kernels.plain import ACTIVATION_FUNCTIONS, GATED_ACTIVATIONS


def linear(
    x: Float[Array, "... i"], kernel: Float[Array, "i o"], bias: Float[Array, " o"] | None = None
) -> Float[Array, "... o"]:
    """Returns `x W + b` in the dtype of `x`; parameters are cast to it at the point of use.

    Accelerators accumulate a low-precision product in float32 before rounding it to the dtype of `x`.
    """
    # Exactly two axes: inside a scan XLA:CPU transposes whole operands for a gradient over several batch axes
    # (measured: 1.4 times slower), and elsewhere the reshape is free.
    rows = x.reshape(-1, x.shape[-1])
    is_thin = 0 < rows.shape[0] <= MOST_ROWS and kernel.dtype == jnp.bfloat16
    y = product_of_few_rows(rows, kernel) if is_thin else rows @ kernel.astype(x.dtype)
    y = y.reshape(*x.shape[:-1], kernel.shape[-1])
    if bias is None:
        return y
    return y + jnp.expand_dims(bias.astype(x.dtype), tuple(range(y.ndim - 1)))


class Product(NamedTuple):
    """The operands of a product `x W` that is not yet computed.

    Attributes:
      x: activations.
      kernel: of the same dtype.
    """

    x: Float[Array, "... i"]
    kernel: Float[Array, "i o"]


def product_of_float32(x: Float[Array, "... i"], kernel: Float[Array, "i o"], dtype: DTypeLike) -> Product:
    """Returns the operands of `x W` in a narrower dtype, without rounding float32 `x`: it is split into two terms.

    The product is twice as large, which costs little where `i` is small.
    """
    bits = jnp.finfo(dtype)
    if bits.bits == 32:
        return Product(x, kernel.astype(x.dtype))
    # `astype` and back would not do: XLA may leave it out.
    large = jax.lax.reduce_precision(x, exponent_bits=bits.nexp, mantissa_bits=bits.nmant)
    terms = jnp.concatenate([large, x - large], axis=-1).astype(dtype)
    return Product(terms, jnp.concatenate([kernel, kernel]).astype(dtype))


@jax.custom_vjp
def sum_of_products(one: Product, other: Product) -> Float[Array, "... o"]:
    """Returns the sum of two products.

    On a TPU they are computed as one product of concatenated operands, which XLA reads in place; a sum would be
    written, read and written again. Elsewhere concatenation would write a copy first, so the two products are added.
    """
    return jax.lax.platform_dependent(one, other, default=_added, tpu=_concatenated)


def _concatenated(one: Product, other: Product) -> Array:
    return linear(jnp.concatenate([one.x, other.x], axis=-1), jnp.concatenate([one.kernel, other.kernel]))


def _added(one: Product, other: Product) -> Array:
    return linear(*one) + linear(*other)


def _sum_forward(one: Product, other: Product) -> tuple[Array, tuple[Product, Product]]:
    return sum_of_products(one, other), (one, other)


def _sum_backward(products: tuple[Product, Product], cotangent: Array) -> tuple[Product, Product]:
    return jax.vjp(_added, *products)[1](cotangent)


sum_of_products.defvjp(_sum_forward, _sum_backward)


@jax.custom_vjp
def linear_float32(x: Float[Array, "... i"], kernel: Float[Array, "i o"]) -> Float[Array, "... o"]:
    """Returns `x W` in float32, never rounded to the dtype of `x`; for logits of a vocabulary.

    Its gradients are products in the dtype of `x`, as those of `linear` are: in float32 they would take many times as
    long on an accelerator.
    """
    y = jax.lax.dot_general(
        x.reshape(-1, x.shape[-1]), kernel.astype(x.dtype), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return y.reshape(*x.shape[:-1], kernel.shape[-1])


def _linear_float32_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return linear_float32(x, kernel), (x, kernel)


def _linear_float32_backward(kept: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, kernel = kept
    return jax.vjp(linear, x, kernel)[1](cotangent.astype(x.dtype))


linear_float32.defvjp(_linear_float32_forward, _linear_float32_backward)


def _along_last(array: Float[Array, "*axes d"], ndim: int) -> Float[Array, "... d"]:
    return jnp.expand_dims(array.astype(jnp.float32), tuple(range(ndim - array.ndim)))


def rms_norm(
    x: Float[Array, "... d"], scale: Float[Array, "*axes d"] | None, eps: float, *, plus_one: bool = False
) -> Float[Array, "... d"]:
    """Root-mean-square norm over the last axis (Zhang & Sennrich, 2019), times `scale`, which may have several axes.

    Args:
      x: the input.
      scale: one factor per element of the last axis, or of as many last axes as it has; None: there are none.
      eps: added to the mean square.
      plus_one: the factors are `1 + scale`, added in float32 (Gemma).
    """
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if scale is None:
        return (x32 * inverse).astype(x.dtype)
    factors = _along_last(scale, x.ndim)
    return (x32 * inverse * (1.0 + factors if plus_one else factors)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "... d"], scale: Float[Array, "*axes d"], bias: Float[Array, " d"] | None, eps: float
) -> Float[Array, "... d"]:
    """Layer norm over the last axis (Ba et al., 2016). A scale with several axes varies along those axes of `x`."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    y = centred * inverse * _along_last(scale, x.ndim)
    return (y if bias is None else y + _along_last(bias, x.ndim)).astype(x.dtype)


def hidden(up: Float[Array, "... f"], gate: Float[Array, "... f"] | None, activation: str) -> Float[Array, "... f"]:
    """Returns `act(gate) * up` for a gated FFN, or `act(up)` for a plain one (`gate` is None).

    Of the activations that only gated FFNs have, both factors are made (`GATED_ACTIVATIONS`).
    """
    if activation in GATED_ACTIVATIONS:
        assert gate is not None, activation
        of_gate, of_up = GATED_ACTIVATIONS[activation]
        return of_gate(gate) * of_up(up)
    act = ACTIVATION_FUNCTIONS[activation]
    return act(up) if gate is None else act(gate) * up


def ffn(
    x: Float[Array, "... d"], kernels: Mapping[str, Array], biases: Mapping[str, Array], activation: str
) -> Float[Array, "... d"]:
    """Returns the output of a dense FFN.

    Args:
      x: activations.
      kernels: `up` [d, f], `down` [f, d], and `gate` [d, f] if the FFN is gated.
      biases: biases of any of them by the same names; may be empty.
      activation: a key of `ACTIVATION_FUNCTIONS`.
    """
    return linear(ffn_hidden(x, kernels, biases, activation), kernels["down"], biases.get("down"))


def ffn_hidden(
    x: Float[Array, "... d"], kernels: Mapping[str, Array], biases: Mapping[str, Array], activation: str
) -> Float[Array, "... f"]:
    """Returns the hidden state, the input of `down`, of a dense FFN. Arguments as for `ffn`; `down` may be missing."""
    gate = linear(x, kernels["gate"], biases.get("gate")) if "gate" in kernels else None
    return hidden(linear(x, kernels["up"], biases.get("up")), gate, activation)


def take_rows(
    table: Float[Array, "n d"], rows: Int[Array, "*B"], *, fill_value: float | None = None
) -> Float[Array, "*B d"]:
    """Returns rows of a table; in the place of those that it does not have, NaN or `fill_value`.

    The gradient of a table is a sum over all places where a row was taken. It is made in float32 and rounded once: in
    bfloat16 a sum of equal terms would not grow beyond 256 of them.
    """
    if jnp.dtype(table.dtype).itemsize < 4:
        return _take(table, rows, fill_value)
    return _plain_rows(table, rows, fill_value)


def _plain_rows(table: Array, rows: Array, fill_value: float | None) -> Array:
    return jnp.take(table, rows, axis=0, mode="fill", fill_value=fill_value)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _take(table: Array, rows: Array, fill_value: float | None) -> Array:
    return _plain_rows(table, rows, fill_value)


def _take_fwd(table: Array, rows: Array, fill_value: float | None) -> tuple[Array, tuple[Array, Array]]:
    like = jnp.zeros((table.shape[0], 0), table.dtype)  # of the table only its length and dtype are needed
    return _plain_rows(table, rows, fill_value), (rows, like)


def _take_bwd(fill_value: float | None, saved: tuple[Array, Array], dy: Array) -> tuple[Array, np.ndarray]:
    rows, like = saved
    sums = jnp.zeros((like.shape[0], dy.shape[-1]), jnp.float32)
    sums = sums.at[rows].add(dy.astype(jnp.float32), mode="drop")
    return sums.astype(like.dtype), np.zeros(rows.shape, jax.dtypes.float0)


_take.defvjp(_take_fwd, _take_bwd)
