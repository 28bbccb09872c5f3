"""Comparison of the predictions that two models make of a text: KL divergence, and the loss of both.

A difference of logits says little by itself: it may be equal for all tokens, or affect only very unlikely ones.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

WINDOW = 128
"""Tokens of a window; each window is predicted from its own tokens alone."""

MOST_TOKENS = 512
"""Most tokens of a text that are compared: the logits of all of them are held at once."""


class ProbeText(NamedTuple):
    """A text that models are compared on.

    Attributes:
      name: name of the text where results are shown: the path of its file.
      ids: of its tokens; the first `MOST_TOKENS` are used.
    """

    name: str
    ids: Int[np.ndarray, " n"]


class TextComparison(NamedTuple):
    """Comparison of the predictions of a text; natural logarithms, means over the scored tokens.

    Attributes:
      text: its name.
      tokens: number of tokens scored.
      kl: KL divergence of the distributions of a next token, from the first model's to the second's.
      loss_before, loss_after: negative log-likelihood of a token, by the first model and the second.
    """

    text: str
    tokens: int
    kl: float
    loss_before: float
    loss_after: float

    def in_words(self) -> str:
        """Returns the figures as a sentence."""
        return (
            f"loss {self.loss_before:.4f} -> {self.loss_after:.4f}, KL divergence {self.kl:.3g} nats per token "
            f"({self.tokens:,} scored)"
        )


def text_rows(text: ProbeText, max_positions: int) -> tuple[Int[np.ndarray, "R T"], Bool[np.ndarray, "R T"]]:
    """Returns a text in rows, consecutive windows, and which of their tokens are scored: all but the first of each.

    The last row is padded with token 0 (models that read from left to right do not see it earlier).
    """
    ids, length = text.ids[:MOST_TOKENS], min(WINDOW, max_positions)
    rows = -(-len(ids) // length)
    tokens, scored = np.zeros(rows * length, np.int32), np.zeros(rows * length, bool)
    tokens[: len(ids)], scored[: len(ids)] = ids, True
    tokens, scored = tokens.reshape(rows, length), scored.reshape(rows, length)
    scored[:, 0] = False
    return tokens, scored


def compare_predictions(
    name: str,
    before: Float[np.ndarray, "R T V"],
    after: Float[np.ndarray, "R T V"],
    tokens: Int[np.ndarray, "R T"],
    scored: Bool[np.ndarray, "R T"],
) -> TextComparison:
    """Compares the logits of two models for the rows of `text_rows`, in float64, a row at a time."""
    kl = loss_before = loss_after = 0.0
    for row, (targets, counts) in enumerate(zip(tokens, scored, strict=True)):
        at = np.flatnonzero(counts)
        first, second = (_log_softmax(logits[row, at - 1]) for logits in (before, after))
        kl += float(np.sum(np.exp(first) * (first - second)))
        loss_before -= float(first[np.arange(len(at)), targets[at]].sum())
        loss_after -= float(second[np.arange(len(at)), targets[at]].sum())
    count = int(scored.sum())
    return TextComparison(name, count, kl / count, loss_before / count, loss_after / count)


def _log_softmax(logits: Float[np.ndarray, "n V"]) -> Float[np.ndarray, "n V"]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
