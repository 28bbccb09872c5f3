"""Routing beside a universal FFN, an FFN that sees every token (METHODS 2.4). Always float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe_jax.functional.linear import linear
from moe_jax.functional.routing import NO_EXPERT, Routing

UNIVERSAL = ("none", "coder", "med")
# The gate that weights the experts beside it (see `route`): Coder-MoE (XFT) has one of its own, Med-MoE takes the
# full softmax's probabilities.
GATE_BESIDE = {"coder": "coder", "med": "softmax_topk"}
NOISE_FLOOR = 1e-2


def universal_weight(logits: Float[Array, "T E"], universal: str) -> Float[Array, " T"]:
    """Weight of the universal FFN.

    `coder`: what the best expert's probability p_1 leaves of 1. The weights of the routed experts sum to p_1, so all
    weights together sum to 1 and equal FFNs add up to one of them. `med`: 1, whatever the experts add.

    Args:
      logits: router logits, float32.
      universal: `coder` or `med`.
    """
    if universal == "med":
        return jnp.ones(logits.shape[:1], jnp.float32)
    return 1.0 - jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)


def add_choice(
    routing: Routing, expert: int, weight: Float[Array, " T"], valid: Bool[Array, " T"] | None = None
) -> Routing:
    """Every valid token also goes to `expert`, as its last choice; padding (None: there is none) does not."""
    last = jnp.full(weight.shape, expert, jnp.int32)
    if valid is not None:
        last, weight = jnp.where(valid, last, NO_EXPERT), jnp.where(valid, weight, 0.0)
    experts = jnp.concatenate([routing.experts, last[:, None]], axis=1)
    return Routing(experts, jnp.concatenate([routing.weights, weight[:, None]], axis=1))


def add_weighted(
    y: Float[Array, "T d"], universal: Float[Array, "T d"], weight: Float[Array, " T"]
) -> Float[Array, "T d"]:
    """`y + weight * universal`, in float32, in the dtype of `y`."""
    return (y.astype(jnp.float32) + weight[:, None] * universal.astype(jnp.float32)).astype(y.dtype)


def coder_logits(
    x: Float[Array, "T d"], hidden: Float[Array, "d E"], out: Float[Array, "E E"]
) -> Float[Array, "T E"]:
    """Logits of XFT's gate network: Linear, tanh, Linear, no biases."""
    return linear(jnp.tanh(linear(x, hidden)), out)


def add_noise(
    logits: Float[Array, "T E"], x: Float[Array, "T d"], noise: Float[Array, "d E"], key: Array
) -> Float[Array, "T E"]:
    """`logits + n * (softplus(x W) + 0.01)` with `n` standard normal: XFT's noise in training (Shazeer, 2017)."""
    scale = jax.nn.softplus(linear(x, noise)) + NOISE_FLOOR
    return logits + scale * jax.random.normal(key, logits.shape, jnp.float32)
