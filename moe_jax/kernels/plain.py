"""Activation functions, and grouped products as XLA lowers them: for kernels and for what needs none."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.core.registry import Registry


class GatedActivation(NamedTuple):
    """An activation of gated FFNs that changes the other factor, too: the hidden state is `gate(g) * up(u)`."""

    gate: Callable[[Array], Array]
    up: Callable[[Array], Array]


def _quick_gelu(x: Array) -> Array:
    return x * jax.nn.sigmoid(1.702 * x)  # Hendrycks and Gimpel 2016; CLIP's


SWIGLU_LIMIT = 7.0
"""Largest magnitude of the factors of `swiglu_clamped`, before one is added to one of them."""

GATED_ACTIVATIONS = {
    # gpt-oss: min(g, 7) sigmoid(1.702 min(g, 7)) (1 + u between -7 and 7)
    "swiglu_clamped": GatedActivation(
        gate=lambda gate: _quick_gelu(jnp.minimum(gate, SWIGLU_LIMIT)),
        up=lambda up: jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT) + 1.0,
    )
}
"""Activations that only gated FFNs can have."""

ACTIVATION_FUNCTIONS: Registry[Callable[[Array], Array]] = Registry(
    "activation",
    {
        "silu": jax.nn.silu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "relu": jax.nn.relu,
        "quick_gelu": _quick_gelu,
        "relu2": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, arXiv:2109.08668; Nemotron
    },
    reserved=GATED_ACTIVATIONS,
)


def register_activation(name: str, function: Callable[[Array], Array]) -> None:
    """Registers an activation function, for `FFNConfig.activation` and `AdapterConfig.activation` to name.

        >>> import jax.numpy as jnp
        >>> moe_jax.functional.register_activation("my_lab.parts:squared_relu", lambda x: jnp.square(jnp.maximum(x, 0)))
        >>> moe_jax.FFNConfig(dim=32, activation="my_lab.parts:squared_relu").dim
        32

    Args:
      name: best the import path of the function, which is in the config of every model with it.
      function: array -> array of the same shape and dtype, entry by entry, of operations that have gradients. In the
        fused kernels of TPUs it gets blocks of float32, and needs operations that Mosaic has.

    Raises:
      InputError: if the name is one of the library's, or no name.
    """
    ACTIVATION_FUNCTIONS.register(name, function)


def activated(gate: Float[Array, "m n"], activation: str) -> Float[Array, "m n"]:
    """Returns the factor that an activation makes of a gate, float32, computed with operations that Mosaic has."""
    if activation in GATED_ACTIVATIONS:
        return GATED_ACTIVATIONS[activation].gate(gate)
    if activation == "gelu":
        # Mosaic lacks `erfc`, which other platforms use here.
        return 0.5 * gate * (1.0 + lax.erf(gate * 0.5**0.5))
    return ACTIVATION_FUNCTIONS[activation](gate)


def gated_factor(up: Float[Array, "*m n"], activation: str) -> Float[Array, "*m n"]:
    """Returns the factor that `activated` is multiplied with: for most activations, what it is given."""
    return GATED_ACTIVATIONS[activation].up(up) if activation in GATED_ACTIVATIONS else up


_OUTER = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def ragged_product(
    lhs: Float[Array, "M i"], rhs: Float[Array, "E i o"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M o"]:
    """Returns `out[m] = lhs[m] @ rhs[group of row m]`; rows in no group are zero."""
    return zero_rows_beyond(lax.ragged_dot(lhs, rhs, group_sizes), jnp.sum(group_sizes))


def ragged_outer(
    lhs: Float[Array, "M i"], dout: Float[Array, "M o"], group_sizes: Int[Array, " E"]
) -> Float[Array, "E i o"]:
    """Returns `out[e] = sum over the rows m of group e of lhs[m]^T dout[m]`."""
    return lax.ragged_dot_general(lhs, dout, group_sizes, _OUTER)


def zero_rows_beyond(rows: Float[Array, "M o"], count: Int[Array, ""]) -> Float[Array, "M o"]:
    """Returns the first `count` rows, and zeros in place of the others."""
    inside = lax.broadcasted_iota(jnp.int32, rows.shape, 0) < count
    return jnp.where(inside, rows, jnp.zeros((), rows.dtype))
