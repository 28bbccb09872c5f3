"""The universal FFN: a shared expert beside the routed ones that sees every token (methods.md 2.4)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.functional.dense import linear

UNIVERSAL = ("none", "coder", "med", "one", "sigmoid")
# Universal FFNs that fix the gate of the experts beside them: Coder-MoE (XFT) has a gate of its own, Med-MoE takes the
# probabilities of the full softmax. The others work with any gate.
GATE_BESIDE = {"coder": "coder", "med": "softmax_topk"}
NOISE_FLOOR = 1e-2


def universal_weight(
    logits: Float[Array, "T E"], universal: str, own_logit: Float[Array, " T"] | None = None
) -> Float[Array, " T"]:
    """Returns the weight of the universal FFN.

    `coder`: 1 - p_1, where p_1 is the largest probability. The weights of the routed experts sum to p_1, so all weights
    together sum to 1: if all FFNs are equal, the layer returns what one of them would. `med` and `one`: always 1.
    `sigmoid`: the sigmoid of a logit of its own.

    Args:
      logits: router logits, float32.
      universal: one of `UNIVERSAL` except `none`.
      own_logit: for `sigmoid`, float32.
    """
    if universal == "sigmoid":
        assert own_logit is not None, "universal 'sigmoid' has a logit of its own"
        return jax.nn.sigmoid(own_logit)
    if universal == "coder":
        return 1.0 - jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)
    return jnp.ones(logits.shape[:1], jnp.float32)


def add_weighted(
    y: Float[Array, "T d"], universal: Float[Array, "T d"], weight: Float[Array, " T"]
) -> Float[Array, "T d"]:
    """Returns `y + weight * universal`, computed in float32 and rounded once to the dtype of `y`."""
    return (y.astype(jnp.float32) + weight[:, None] * universal.astype(jnp.float32)).astype(y.dtype)


def coder_logits(x: Float[Array, "T d"], hidden: Float[Array, "d E"], out: Float[Array, "E E"]) -> Float[Array, "T E"]:
    """Returns the logits of XFT's gate network: a linear map, tanh and another linear map, without biases."""
    return linear(jnp.tanh(linear(x, hidden)), out)


def add_noise(
    logits: Float[Array, "T E"], x: Float[Array, "T d"], noise: Float[Array, "d E"], key: Array
) -> Float[Array, "T E"]:
    """Returns `logits + n * (softplus(x W) + 0.01)`, n standard normal: XFT's training noise (Shazeer et al. 2017)."""
    scale = jax.nn.softplus(linear(x, noise)) + NOISE_FLOOR
    return logits + scale * jax.random.normal(key, logits.shape, jnp.float32)
