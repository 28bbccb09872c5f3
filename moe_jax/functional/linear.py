"""The one way a kernel meets activations."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def linear(
    x: Float[Array, "... i"], kernel: Float[Array, "i o"], bias: Float[Array, " o"] | None = None
) -> Float[Array, "... o"]:
    """`x W + b` in the dtype of `x`; parameters are cast to it at the point of use.

    Accelerators accumulate a low-precision product in float32 before rounding it to the dtype of `x`.
    """
    # Two axes, and not more: inside a scan XLA:CPU transposes whole operands for a gradient over several batch axes
    # (measured: 1.4 times slower), and elsewhere the reshape is free.
    y = (x.reshape(-1, x.shape[-1]) @ kernel.astype(x.dtype)).reshape(*x.shape[:-1], kernel.shape[-1])
    if bias is None:
        return y
    return y + jnp.expand_dims(bias.astype(x.dtype), tuple(range(y.ndim - 1)))


def linear_of_float32(x: Float[Array, "... i"], kernel: Float[Array, "i o"], dtype: DTypeLike) -> Float[Array, "... o"]:
    """`x W` of float32 `x` in a dtype of fewer bits, to which `x` is not rounded: it is split into two terms.

    The product is twice as large, which costs little where `i` is small.
    """
    bits = jnp.finfo(dtype)
    if bits.bits == 32:
        return linear(x, kernel)
    # Not by `astype` and back, which XLA may leave out.
    large = jax.lax.reduce_precision(x, exponent_bits=bits.nexp, mantissa_bits=bits.nmant)
    terms = jnp.concatenate([large, x - large], axis=-1).astype(dtype)
    return linear(terms, jnp.concatenate([kernel, kernel]))


@jax.custom_vjp
def linear_float32(x: Float[Array, "... i"], kernel: Float[Array, "i o"]) -> Float[Array, "... o"]:
    """`x W`, the sums given back in float32 and never rounded to the dtype of `x`; for logits of a vocabulary.

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
