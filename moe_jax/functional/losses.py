"""Losses, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def next_token_loss(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted negative log-likelihood of the targets, natural log.

    Args:
      logits: float32.
      targets: the token that follows every position.
      weights: 0 leaves a position out.

    Returns:
      The sum of weighted losses and the sum of weights; their ratio is the mean loss.
    """
    return jnp.sum(token_losses(logits, targets) * weights), jnp.sum(weights)


def token_losses(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Negative log-likelihood of every target, natural log, float32."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
