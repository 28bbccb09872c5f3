"""Rows that are continued, and how they are."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from moe_jax.core.errors import MAX_SIZE
from moe_jax.kernels.hardware import bucket
from moe_jax.nn import Caches

MOST_STOP_IDS = 16
"""Tokens that may end a row, where rows come and go."""


class Asked(NamedTuple):
    """How rows are continued.

    Attributes:
      key: of sampling: one for all rows, or one for every row; a row's step is folded into it.
      temperature, top_k, top_p: see `functional.sampling.sample`.
      stop_ids: tokens that end a row; -1 stands for none.
      most: tokens that a row may be given.
      scores: rows whose tokens are scored, if the programs score any.
    """

    key: PRNGKeyArray
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    stop_ids: Int[Array, "B n"]
    most: Int[Array, " B"]
    scores: Bool[Array, " B"]


class Rows(NamedTuple):
    """Rows that are continued, some of which may have ended.

    Attributes:
      caches: of all tokens of every row but the last.
      tokens: the last token of every row.
      positions: its position in every row.
      steps: how many tokens every row was given.
      active: rows that are given more.
      finite: whether the logits of every row always were.
      asked: how they are continued.
      encoder_valid: what counts of the encoder's output; None: there is none.
    """

    caches: Caches
    tokens: Int[Array, " B"]
    positions: Int[Array, " B"]
    steps: Int[Array, " B"]
    active: Bool[Array, " B"]
    finite: Bool[Array, " B"]
    asked: Asked
    encoder_valid: Bool[Array, "B S"] | None = None


def ask(
    batch: int,
    most: int,
    *,
    key: PRNGKeyArray,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: Sequence[int] = (),
    scores: bool = False,
) -> Asked:
    """Returns how `batch` rows are continued that are all continued in one way; arguments as in `Asked`."""
    stops = [*stop_ids, *[-1] * (bucket(len(stop_ids), least=MOST_STOP_IDS) - len(stop_ids))]
    return Asked(
        key=key,
        temperature=jnp.full(batch, temperature, jnp.float32),
        top_k=jnp.full(batch, MAX_SIZE if top_k is None else min(top_k, MAX_SIZE), jnp.int32),
        top_p=jnp.full(batch, 1.0 if top_p is None else top_p, jnp.float32),
        stop_ids=jnp.tile(jnp.asarray(stops, jnp.int32), (batch, 1)),
        most=jnp.full(batch, most, jnp.int32),
        scores=jnp.full(batch, scores),
    )
