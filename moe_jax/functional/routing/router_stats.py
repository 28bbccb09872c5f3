"""Statistics of routers, which auxiliary losses and reports are made of."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class RouterStats(NamedTuple):
    """Statistics of a router's decisions for a batch: means over the tokens that are not padding; float32.

    They may be stacked, and be NumPy's.

    Attributes:
      z: mean squared logsumexp of the logits.
      load: share f_i of the assignments per expert; sums to 1. It is a count, without a gradient.
      dropped: share of the assignments that are beyond the capacity.
      importance: an expert's sum of probabilities over the tokens that chose it, by the number of all tokens.
      probability: mean probability P_i per expert; sums to 1.
      gram: mean over the tokens of the product of the logits of every two experts. It has no gradient.
      tokens: the number of tokens.
      balanced_load: the load that the balance loss is of: `load`, or the share of the first choices alone.
      sequence_balance: mean over the tokens of the `balance` within each one's sequence; 0 where it was not asked for.
    """

    z: Float[Array, ""]
    load: Float[Array, " E"]
    dropped: Float[Array, ""]
    importance: Float[Array, " E"]
    probability: Float[Array, " E"]
    gram: Float[Array, "E E"]
    tokens: Float[Array, ""]
    balanced_load: Float[Array, " E"]
    sequence_balance: Float[Array, ""]

    @property
    def balance(self) -> Float[Array, ""]:
        """`E * sum_i f_i P_i` with the `balanced_load` f, 1 for uniform routing, E/k when collapsed onto k experts.

        The gradient reaches the router through the probabilities alone.
        """
        return self.load.shape[-1] * (self.balanced_load * self.probability).sum(-1)

    @property
    def cv(self) -> Float[Array, ""]:
        """Squared coefficient of variation of the importance plus that of the load, as XFT adds them; 0 if uniform."""
        return squared_cv(self.importance) + squared_cv(self.load)


def sums_of(stats: RouterStats) -> RouterStats:
    """Returns statistics as sums over the tokens, which those of several batches can be added to."""
    return _scaled(stats, stats.tokens)


def means_of(sums: RouterStats) -> RouterStats:
    """Returns the statistics of sums over tokens."""
    return _scaled(sums, 1.0 / jnp.maximum(sums.tokens, 1.0))


def _scaled(stats: RouterStats, factor: Array) -> RouterStats:
    scaled = (field * factor.reshape(factor.shape + (1,) * (field.ndim - factor.ndim)) for field in stats)
    return RouterStats(*scaled)._replace(tokens=stats.tokens)


def squared_cv(x: Float[Array, "*S E"]) -> Float[Array, "*S"]:
    """Returns the squared coefficient of variation: sample variance, as in XFT, over squared mean.

    It is 0 where all entries are equal, and E/k * (E - k)/(E - 1) where k of E entries are equal and the others 0.
    """
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).sum(-1) / max(1, x.shape[-1] - 1)
    return variance / (mean[..., 0] ** 2 + 1e-10)


def balance_within(
    sequences: int | Int[Array, "R n"],
    shares: Float[Array, "T E"],
    probabilities: Float[Array, "T E"],
    counted: Float[Array, " T"],
) -> Float[Array, ""]:
    """Returns the sum over sequences of their tokens times `E * sum_i f_i P_i`, both taken within the sequence.

    Of sequences of equal length, its mean over the tokens is DeepSeek-V3's complementary loss (arXiv:2412.19437,
    equations 17 to 20) without the coefficient: the mean over the sequences. A longer one counts by its tokens.

    Args:
      sequences: as in `route`.
      shares: of every token's one assignment, split over its k experts; zeros for padding.
      probabilities: scores, normalised over the experts.
      counted: 1 for tokens that are not padding, 0 for padding.
    """
    rows = sequences if isinstance(sequences, int) else sequences.shape[0]
    parts = (jax.lax.stop_gradient(shares), probabilities * counted[:, None], counted[:, None])
    parts = [part.reshape(rows, -1, part.shape[-1]) for part in parts]
    if isinstance(sequences, int):
        load, probability, tokens = (jnp.sum(part, axis=1) for part in parts)
    else:
        # Which of its row's documents a token belongs to, counted from 0; there are no more of them than tokens.
        begins = jnp.diff(sequences, axis=1, prepend=sequences[:, :1]) != 0
        document = jnp.cumsum(begins.astype(jnp.int32), axis=1)
        sums = jax.vmap(lambda part, at: jax.ops.segment_sum(part, at, num_segments=at.shape[0]))
        load, probability, tokens = (sums(part, document) for part in parts)
    return shares.shape[-1] * jnp.sum(load * probability / jnp.maximum(tokens, 1.0))
