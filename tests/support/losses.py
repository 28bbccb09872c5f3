"""Losses of logits in plain JAX, float32, as references for those of the library."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def next_token_loss(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the weighted sum of the negative log-likelihoods (natural logarithm) of the targets.

    Args:
      logits: float32.
      targets: the next token at every position.
      weights: of the positions; 0 leaves one out.

    Returns:
      The sum of the weighted losses and the sum of the weights; their quotient is the mean loss.
    """
    return jnp.sum(token_losses(logits, targets) * weights), jnp.sum(weights)


def token_losses(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns the negative log-likelihood (natural logarithm) of every target, float32."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
