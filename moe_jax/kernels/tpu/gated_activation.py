"""Activations of gates inside kernels."""

from jax import lax
from jaxtyping import Array, Float

from moe_jax.functional.ffn import ACTIVATION_FUNCTIONS


def activated(gate: Float[Array, "m n"], activation: str) -> Float[Array, "m n"]:
    """The activation of a gate, float32, in operations that Mosaic has."""
    if activation == "gelu":
        # Mosaic has no `erfc`, with which it is computed elsewhere.
        return 0.5 * gate * (1.0 + lax.erf(gate * 0.5**0.5))
    return ACTIVATION_FUNCTIONS[activation](gate)
