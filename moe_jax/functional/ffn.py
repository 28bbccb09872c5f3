"""Feed-forward networks: activations, and the dense FFN."""

from collections.abc import Mapping

from jaxtyping import Array, Float

from moe_jax.functional.products.linear import linear
from moe_jax.kernels.activations import ACTIVATION_FUNCTIONS


def hidden(up: Float[Array, "... f"], gate: Float[Array, "... f"] | None, activation: str) -> Float[Array, "... f"]:
    """Returns `act(gate) * up` for a gated FFN, or `act(up)` for a plain one (`gate` is None)."""
    act = ACTIVATION_FUNCTIONS[activation]
    return act(up) if gate is None else act(gate) * up


def ffn(
    x: Float[Array, "... d"],
    kernels: Mapping[str, Float[Array, "i o"]],
    biases: Mapping[str, Float[Array, " o"]],
    activation: str,
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
    x: Float[Array, "... d"],
    kernels: Mapping[str, Float[Array, "d f"]],
    biases: Mapping[str, Float[Array, " f"]],
    activation: str,
) -> Float[Array, "... f"]:
    """Returns the hidden state, the input of `down`, of a dense FFN. Arguments as for `ffn`; `down` may be missing."""
    gate = linear(x, kernels["gate"], biases.get("gate")) if "gate" in kernels else None
    return hidden(linear(x, kernels["up"], biases.get("up")), gate, activation)
