"""Products of activations with one kernel, and how their sums are accumulated and rounded."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def linear(
    x: Float[Array, "... i"], kernel: Float[Array, "i o"], bias: Float[Array, " o"] | None = None
) -> Float[Array, "... o"]:
    """Returns `x W + b` in the dtype of `x`; parameters are cast to it at the point of use.

    Accelerators accumulate a low-precision product in float32 before rounding it to the dtype of `x`.
    """
    # Exactly two axes: inside a scan XLA:CPU transposes whole operands for a gradient over several batch axes
    # (measured: 1.4 times slower), and elsewhere the reshape is free.
    y = (x.reshape(-1, x.shape[-1]) @ kernel.astype(x.dtype)).reshape(*x.shape[:-1], kernel.shape[-1])
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
        x.reshape(-1, x.shape[-1]),
        kernel.astype(x.dtype),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return y.reshape(*x.shape[:-1], kernel.shape[-1])


def _linear_float32_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return linear_float32(x, kernel), (x, kernel)


def _linear_float32_backward(kept: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, kernel = kept
    return jax.vjp(linear, x, kernel)[1](cotangent.astype(x.dtype))


linear_float32.defvjp(_linear_float32_forward, _linear_float32_backward)
