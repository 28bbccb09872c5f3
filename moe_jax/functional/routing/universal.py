"""Routing beside a universal FFN, one that sees every token: a shared expert (methods.md 2.4). Always float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe_jax.functional.products.linear import linear
from moe_jax.functional.routing.decision import NO_EXPERT, Routing

UNIVERSAL = ("none", "coder", "med", "one", "sigmoid")
# Those that bring the gate that weights the experts beside them: Coder-MoE (XFT) has one of its own, Med-MoE takes the
# full softmax's probabilities. Beside the others any gate stands.
GATE_BESIDE = {"coder": "coder", "med": "softmax_topk"}
NOISE_FLOOR = 1e-2


def universal_weight(
    logits: Float[Array, "T E"], universal: str, own_logit: Float[Array, " T"] | None = None
) -> Float[Array, " T"]:
    """Weight of the universal FFN.

    `coder`: 1 - p_1, where p_1 is the largest probability. The weights of the routed experts sum to p_1, so that all
    weights together sum to 1: if all FFNs are equal, the layer gives what one of them gives. `med` and `one`: always 1.
    `sigmoid`: the sigmoid of a logit of its own.

    Args:
      logits: router logits, float32.
      universal: one of `UNIVERSAL` but `none`.
      own_logit: for `sigmoid`, float32.
    """
    if universal == "sigmoid":
        assert own_logit is not None, "universal 'sigmoid' has a logit of its own"
        return jax.nn.sigmoid(own_logit)
    if universal == "coder":
        return 1.0 - jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)
    return jnp.ones(logits.shape[:1], jnp.float32)


def add_choice(
    routing: Routing, expert: int, weight: Float[Array, " T"], valid: Bool[Array, " T"] | None = None
) -> Routing:
    """Adds a last choice to every token: `expert`, with the given weight.

    Args:
      routing: the choices so far.
      expert: index of the expert in its bank.
      weight: float32.
      valid: tokens that are not padding; the last choice of padding is `NO_EXPERT`. None: all.
    """
    last = jnp.full(weight.shape, expert, jnp.int32)
    if valid is not None:
        last, weight = jnp.where(valid, last, NO_EXPERT), jnp.where(valid, weight, 0.0)
    experts = jnp.concatenate([routing.experts, last[:, None]], axis=1)
    return Routing(experts, jnp.concatenate([routing.weights, weight[:, None]], axis=1))


def add_weighted(
    y: Float[Array, "T d"], universal: Float[Array, "T d"], weight: Float[Array, " T"]
) -> Float[Array, "T d"]:
    """`y + weight * universal`, computed in float32 and rounded once to the dtype of `y`."""
    return (y.astype(jnp.float32) + weight[:, None] * universal.astype(jnp.float32)).astype(y.dtype)


def coder_logits(x: Float[Array, "T d"], hidden: Float[Array, "d E"], out: Float[Array, "E E"]) -> Float[Array, "T E"]:
    """Logits of XFT's gate network: a linear map, tanh and another linear map, without biases."""
    return linear(jnp.tanh(linear(x, hidden)), out)


def add_noise(
    logits: Float[Array, "T E"], x: Float[Array, "T d"], noise: Float[Array, "d E"], key: Array
) -> Float[Array, "T E"]:
    """`logits + n * (softplus(x W) + 0.01)`, n standard normal: the noise of XFT in training (Shazeer et al. 2017)."""
    scale = jax.nn.softplus(linear(x, noise)) + NOISE_FLOOR
    return logits + scale * jax.random.normal(key, logits.shape, jnp.float32)
