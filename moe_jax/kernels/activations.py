"""The activation functions of FFNs, and how kernels compute them."""

from collections.abc import Callable
from functools import partial

import jax
from jax import lax
from jaxtyping import Array, Float

ACTIVATION_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def activated(gate: Float[Array, "m n"], activation: str) -> Float[Array, "m n"]:
    """Returns the activation of a gate, float32, computed with operations that Mosaic has."""
    if activation == "gelu":
        # Mosaic lacks `erfc`, which other platforms use here.
        return 0.5 * gate * (1.0 + lax.erf(gate * 0.5**0.5))
    return ACTIVATION_FUNCTIONS[activation](gate)
