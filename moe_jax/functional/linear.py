"""The one way a kernel meets activations."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def linear(
    x: Float[Array, "... i"], kernel: Float[Array, "i o"], bias: Float[Array, " o"] | None = None
) -> Float[Array, "... o"]:
    """`x W + b` in the dtype of `x`; parameters are cast to it at the point of use.

    Accelerators accumulate a low-precision product in float32 before rounding it to the dtype of `x`.
    """
    y = jax.lax.dot_general(x, kernel.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())))
    if bias is None:
        return y
    return y + jnp.expand_dims(bias.astype(x.dtype), tuple(range(y.ndim - 1)))
