"""The compiled programs of the server: one that reads a prompt, one that seats it, one that continues all rows.

A row is a request that is being answered. The number of rows is fixed; what differs between them is data: length, the
tokens that end them, how tokens are chosen. So a request that comes or goes compiles nothing. Programs differ by the
bucket of the prompt's length, by the slots of the caches, and by what has to be computed (`Doing`).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from moe_jax.functional.heads.sampling import sample_rows
from moe_jax.models import ModelConfig
from moe_jax.nn import Caches, Decoder, init_cache

MOST_STEPS = 32
"""Tokens of the longest block."""
MOST_SCORES = 20
"""Most likely tokens that are told of a position."""
_CHUNK = 8


class Doing(NamedTuple):
    """What of the work is compiled into the programs.

    Attributes:
      greedy: whether all rows take the most likely token.
      has_top_p: whether some row samples from a part of the tokens.
      scores: whether somebody wants log-probabilities.
    """

    greedy: bool
    has_top_p: bool
    scores: bool


class Asked(NamedTuple):
    """How rows are continued.

    Attributes:
      seeds, temperature, top_p: see `functional.heads.sampling.sample_rows`.
      stop_ids: tokens that end a row; -1 stands for none.
      most: tokens that a row may be given.
    """

    seeds: UInt32[Array, " B"]
    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    stop_ids: Int[Array, "B n"]
    most: Int[Array, " B"]


class Rows(NamedTuple):
    """Rows that are continued, and seats that are free.

    Attributes:
      caches: of all tokens of every row but the last.
      tokens: the last token of every row.
      positions: theirs.
      steps: how many tokens every row was given.
      active: rows that are given more.
      finite: whether the logits of every row always were.
      asked: how they are continued.
    """

    caches: Caches
    tokens: Int[Array, " B"]
    positions: Int[Array, " B"]
    steps: Int[Array, " B"]
    active: Bool[Array, " B"]
    finite: Bool[Array, " B"]
    asked: Asked


class Scores(NamedTuple):
    """Log-probabilities of tokens where they stand.

    Attributes:
      chosen: of the token that stands there.
      top: of the most likely ones, from the most likely on.
      top_ids: those.
    """

    chosen: Float[Array, "n B"]
    top: Float[Array, "n B K"]
    top_ids: Int[Array, "n B K"]


def empty_rows(config: ModelConfig, batch: int, slots: int, stop_ids: int, dtype: jnp.dtype) -> Rows:
    """Free seats.

    Args:
      config: of the model.
      batch: seats.
      slots: tokens that a row may have.
      stop_ids: tokens that may end a row.
      dtype: of the caches.
    """
    asked = Asked(
        seeds=jnp.zeros((batch,), jnp.uint32),
        temperature=jnp.zeros((batch,), jnp.float32),
        top_p=jnp.ones((batch,), jnp.float32),
        stop_ids=jnp.full((batch, stop_ids), -1, jnp.int32),
        most=jnp.zeros((batch,), jnp.int32),
    )
    return Rows(
        caches=init_cache(config, batch, slots, dtype, stacked=False, rings=True),
        tokens=jnp.zeros((batch,), jnp.int32),
        positions=jnp.zeros((batch,), jnp.int32),
        steps=jnp.zeros((batch,), jnp.int32),
        active=jnp.zeros((batch,), bool),
        finite=jnp.ones((batch,), bool),
        asked=asked,
    )


@partial(jax.jit, static_argnames=("graphdef", "doing", "scores_prompt"))
def read_prompt(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    prompt: Int[Array, "1 T"],
    length: Int[Array, " 1"],
    asked: Asked,
    *,
    doing: Doing,
    scores_prompt: bool,
) -> tuple[Rows, Scores | None, Scores | None]:
    """Reads a prompt, padded on the right, and chooses the first token after it.

    Args:
      graphdef, state: of a `Decoder` whose layers are not stacked (`nn.unstacked`).
      prompt: token ids.
      length: of the prompt.
      asked: of one row.
      doing: what is computed.
      scores_prompt: whether the tokens of the prompt are scored.

    Returns:
      The row, whose caches have slots for the prompt alone; the scores of the first token; and of the prompt's tokens
      from the second on.
    """
    model = nnx.merge(graphdef, state)
    slots = prompt.shape[1]
    in_row = jnp.arange(slots, dtype=jnp.int32)[None, :]
    caches = init_cache(model.config, 1, slots, model.compute_dtype, stacked=False, rings=True)
    x, caches, _ = model.activations(
        prompt, positions=in_row, valid=in_row < length[:, None], caches=caches, begins=True
    )
    assert caches is not None
    last = jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)
    row = Rows(
        caches=caches,
        tokens=jnp.zeros((1,), jnp.int32),
        positions=length - 1,
        steps=jnp.zeros((1,), jnp.int32),
        active=asked.most > 0,
        finite=jnp.ones((1,), bool),
        asked=asked,
    )
    row, scores = _advance(row, model.logits(last)[:, 0], doing)
    if scores is not None:
        scores = jax.tree.map(lambda leaf: leaf[None], scores)
    return row, scores, _score_prompt(model, x, prompt) if scores_prompt else None


def _score_prompt(model: Decoder, x: Float[Array, "1 T d"], prompt: Int[Array, "1 T"]) -> Scores:
    """A few positions at a time: logits of all of them would take much memory."""
    size = _CHUNK if x.shape[1] % _CHUNK == 0 else x.shape[1]
    targets = jnp.roll(prompt, -1, axis=1)  # the last is scored against the first, and not told

    def chunk(part: tuple[Array, Array]) -> Scores:
        return _scores(model.logits(part[0][None])[0], part[1])

    parts = (x[0].reshape(-1, size, x.shape[2]), targets[0].reshape(-1, size))
    scored = jax.lax.map(chunk, parts)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, 1, *leaf.shape[2:]), scored)


@partial(jax.jit, donate_argnames="rows")
def seat(rows: Rows, row: Rows, at: Int[Array, ""]) -> Rows:
    """Puts a row on a seat.

    The slots of its caches are the first ones of the seat's. What was in later ones cannot be seen: they are of later
    positions, and written before those are reached.
    """
    seated = jax.tree.map(lambda all_, one: _put(all_, one, at, 0), rows._replace(caches=()), row._replace(caches=()))
    caches = jax.tree.map(lambda all_, one: _put(all_, one, at, 1), rows.caches, row.caches)
    return seated._replace(caches=caches)


def _put(rows: Array, row: Array, at: Int[Array, ""], axis: int) -> Array:
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.dynamic_update_slice(rows, row, tuple(at if i == axis else zero for i in range(rows.ndim)))


@partial(jax.jit, donate_argnames="rows")
def leave(rows: Rows, stay: Bool[Array, " B"]) -> Rows:
    """Frees the seats of all rows but those that stay."""
    return rows._replace(active=rows.active & stay)


@partial(jax.jit, static_argnames=("config", "slots", "dtype"))
def with_slots(rows: Rows, config: ModelConfig, slots: int, dtype: jnp.dtype) -> Rows:
    """Rows whose caches have more slots. Rings, once they go round, have as many as they need."""
    larger = init_cache(config, rows.tokens.shape[0], slots, dtype, stacked=False, rings=True)
    zero = jnp.zeros((), jnp.int32)
    return rows._replace(caches=jax.tree.map(lambda new, old: _put(new, old, zero, 0), larger, rows.caches))


@partial(jax.jit, static_argnames=("graphdef", "doing", "first"), donate_argnames="rows")
def continue_all(
    graphdef: nnx.GraphDef, state: nnx.State, rows: Rows, steps: Int[Array, ""], *, doing: Doing, first: int
) -> tuple[Rows, Int[Array, "n B"], Scores | None]:
    """Gives active rows tokens, until none is active, or `steps` times; at most `MOST_STEPS`.

    Args:
      graphdef, state: as for `read_prompt`.
      rows: their caches are updated in place.
      steps: how many tokens a row is given at most.
      doing: what is computed.
      first: how many of the first seats are looked at; no row on a later one is active. On a CPU one row
        costs less than many.

    Returns:
      The rows; the tokens of every step, -1 where a row was given none; and their scores; both of the first seats.
    """
    model, batch, everyone = nnx.merge(graphdef, state), first, rows
    if first < everyone.tokens.shape[0]:
        cut = partial(jax.lax.slice_in_dim, start_index=0, limit_index=first)
        rows = jax.tree.map(cut, everyone._replace(caches=()))
        rows = rows._replace(caches=jax.tree.map(partial(cut, axis=1), everyone.caches))
    steps = jnp.minimum(steps, MOST_STEPS)
    most_scores = min(MOST_SCORES, model.config.vocab_size)

    def goes_on(carry: tuple) -> Array:
        step, rows, _, _ = carry
        return (step < steps) & jnp.any(rows.active)

    def one_step(carry: tuple) -> tuple:
        step, rows, block, scores = carry
        out = model(rows.tokens[:, None], positions=rows.positions[:, None], caches=rows.caches)
        given = rows.active
        rows, found = _advance(rows._replace(caches=out.caches), out.logits[:, 0], doing)
        block = block.at[step].set(jnp.where(given, rows.tokens, -1))
        return step + 1, rows, block, jax.tree.map(lambda all_, one: all_.at[step].set(one), scores, found)

    block = jnp.full((MOST_STEPS, batch), -1, jnp.int32)
    scores = None
    if doing.scores:
        wide = (MOST_STEPS, batch, most_scores)
        scores = Scores(jnp.zeros(wide[:2], jnp.float32), jnp.zeros(wide, jnp.float32), jnp.zeros(wide, jnp.int32))
    _, rows, block, scores = jax.lax.while_loop(goes_on, one_step, (jnp.zeros((), jnp.int32), rows, block, scores))
    if first < everyone.tokens.shape[0]:
        rows = seat(everyone, rows, jnp.zeros((), jnp.int32))
    return rows, block, scores


def _advance(rows: Rows, logits: Float[Array, "B V"], doing: Doing) -> tuple[Rows, Scores | None]:
    """The rows, with a token more where they are active."""
    asked = rows.asked
    chosen = sample_rows(
        logits,
        asked.seeds,
        rows.steps,
        asked.temperature,
        asked.top_p,
        greedy=doing.greedy,
        has_top_p=doing.has_top_p,
    )
    finite = rows.finite & (jnp.all(jnp.isfinite(logits), axis=-1) | ~rows.active)
    given = rows.active.astype(jnp.int32)
    ends = jnp.any(chosen[:, None] == asked.stop_ids, axis=1) | (rows.steps + given >= asked.most) | ~finite
    advanced = rows._replace(
        tokens=jnp.where(rows.active, chosen, rows.tokens),
        positions=rows.positions + given,
        steps=rows.steps + given,
        active=rows.active & ~ends,
        finite=finite,
    )
    return advanced, _scores(logits, chosen) if doing.scores else None


def _scores(logits: Float[Array, "n V"], tokens: Int[Array, " n"]) -> Scores:
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(log_probabilities, tokens[:, None], axis=-1)[:, 0]
    return Scores(chosen, *jax.lax.top_k(log_probabilities, min(MOST_SCORES, logits.shape[-1])))
