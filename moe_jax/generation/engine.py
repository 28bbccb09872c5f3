"""The engine of tokens: rows of one model, read and continued in blocks; for `generate` and for `serve`.

Two compiled programs, one that reads prompts and one that gives rows more tokens, and small ones that move rows
(`sizes`). A row is a text that is being continued. What differs between rows is data: length, how tokens are chosen,
which tokens end them. So rows that come or go compile nothing. Programs differ by the number of rows, by the bucket of
the prompts' length, and by the length of the caches.
"""

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt8

from moe_jax.distributed.processes import on_host
from moe_jax.distributed.sharding import mesh_of
from moe_jax.experts.devices import current_chip
from moe_jax.functional.group_loops import of_this_turn
from moe_jax.functional.sampling import sample
from moe_jax.generation.ahead import Ahead
from moe_jax.generation.arrange import arranged
from moe_jax.generation.continued_rows import Asked, Rows
from moe_jax.generation.layer_loop import for_rows
from moe_jax.generation.pictures import PictureFeatures, Pictures
from moe_jax.generation.sizes import Mover, Size
from moe_jax.kernels.hardware import bucket
from moe_jax.nn import Decoder, init_cache, is_stacked

MOST_STEPS = 32
"""Tokens of the longest block."""
SECONDS_SEEN = 0.05
"""Time of a block while somebody reads along: no pause that is seen, and long beside what a call costs."""
MOST_SCORES = 20
"""Most likely tokens that are told of a position."""
_CHUNK = 8


class Scores(NamedTuple):
    """Log-probabilities where tokens stand: of the token there, and of the most likely ones, the likeliest first."""

    chosen: Float[Array, "n B"]
    top: Float[Array, "n B K"]
    top_ids: Int[Array, "n B K"]


@partial(jax.jit, static_argnames=("graphdef", "cache_length", "draws", "scores", "scores_prompt"))
def read_prompts(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    prompts: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    asked: Asked,
    *,
    cache_length: int,
    draws: bool,
    scores: bool = False,
    scores_prompt: bool = False,
    pixels: UInt8[Array, "B M H W 3"] | None = None,
    features: Float[Array, "B M n w"] | None = None,
    slots: Int[Array, "B T"] | None = None,
) -> tuple[Rows, Int[Array, "1 B"], Scores | None, Scores | None]:
    """Reads prompts, padded on the right, and chooses the first token of every row.

    A row's tokens take the first places of its cache; what padding left in later ones is overwritten before it can be
    seen. With an encoder, that is what reads the prompts, and the decoder begins with its own first token.

    Args:
      graphdef, state: of a `Decoder`, stacked or not (`layer_loop.for_rows`).
      prompts: token ids.
      lengths: of the prompts.
      asked: how the rows are continued.
      cache_length: tokens that the caches have room for; sliding windows keep no more than they need.
      draws: whether any row may have a temperature.
      scores: whether any row may want log-probabilities.
      scores_prompt: whether the tokens of the prompt are scored; of one row.
      pixels, features, slots: pictures in the prompts, as in `Decoder`.

    Returns:
      The rows; the first tokens, and their scores, as of `continue_rows`; the scores of the prompt's tokens from the
      second on.
    """
    model = nnx.merge(graphdef, state)
    batch, length = prompts.shape
    in_row = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], prompts.shape)
    valid, encodes = in_row < lengths[:, None], model.config.has_encoder
    source_slots = length if encodes else None
    made = {"source_slots": source_slots, "stacked": is_stacked(model), "rings": True}
    caches = init_cache(model.config, batch, cache_length, model.compute_dtype, **made)
    if encodes:
        first = jnp.full((batch, 1), model.config.decoder_start_id, jnp.int32)
        source = {"inputs": prompts, "inputs_valid": valid}
        out = model.activations(first, **source, positions=jnp.zeros_like(first), caches=caches, begins=True)
        last = jnp.zeros_like(lengths)
    else:
        out = model.activations(
            prompts,
            pixels=pixels,
            features=features,
            slots=slots,
            positions=in_row,
            valid=valid,
            caches=caches,
            begins=True,
        )
        last = lengths - 1
    assert out.caches is not None
    rows = Rows(
        caches=out.caches,
        tokens=jnp.zeros((batch,), jnp.int32),
        positions=last,
        steps=jnp.zeros((batch,), jnp.int32),
        active=asked.most > 0,
        finite=jnp.ones((batch,), bool),
        asked=asked,
        encoder_valid=valid if encodes else None,
    )
    logits = model.logits(jnp.take_along_axis(out.x, last[:, None, None], axis=1))[:, 0]
    rows, tokens, found = _advance(rows, logits, draws, scores)
    tokens, found = jax.tree.map(lambda leaf: leaf[None], (tokens, found))
    return rows, tokens, found, _score_prompt(model, out.x, prompts) if scores_prompt else None


@partial(jax.jit, static_argnames=("graphdef", "draws", "scores"), donate_argnames="rows")
def continue_rows(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    rows: Rows,
    stay: Bool[Array, " B"],
    steps: Int[Array, ""],
    least: Int[Array, ""],
    *,
    draws: bool,
    scores: bool = False,
) -> tuple[Rows, Int[Array, "n B"], Scores | None]:
    """Gives active rows a token, again and again, `steps` times and at most `MOST_STEPS` times.

    Args:
      graphdef, state, draws, scores: as for `read_prompts`.
      rows: updated in place.
      stay: rows that are wanted; the others are not active any more.
      steps: how many tokens a row is given at most.
      least: as soon as fewer rows than this are active, no more tokens are given; at least 1.

    Returns:
      The rows; the tokens of every step, -1 where a row was given none; and their scores.
    """
    batch, vocabulary = rows.tokens.shape[0], nnx.merge(graphdef, state).config.vocab_size
    steps = jnp.minimum(steps, MOST_STEPS)

    def goes_on(carry: tuple) -> Array:
        step, rows, _, _ = carry
        return (step < steps) & (jnp.sum(rows.active) >= jnp.maximum(least, 1))

    def one_step(carry: tuple) -> tuple:
        step, rows, block, told = carry
        of_step, tokens = of_this_turn(state, rows.tokens) if current_chip().platform == "cpu" else (state, rows.tokens)
        model, tokens, positions = nnx.merge(graphdef, of_step), tokens[:, None], rows.positions[:, None]
        out = model(tokens, positions=positions, caches=rows.caches, encoder_valid=rows.encoder_valid)
        rows, tokens, found = _advance(rows._replace(caches=out.caches), out.logits[:, 0], draws, scores)
        told = jax.tree.map(lambda all_, one: all_.at[step].set(one), told, found)
        return step + 1, rows, block.at[step].set(tokens), told

    told = None
    if scores:
        wide = (MOST_STEPS, batch, min(MOST_SCORES, vocabulary))
        told = Scores(jnp.zeros(wide[:2], jnp.float32), jnp.zeros(wide, jnp.float32), jnp.zeros(wide, jnp.int32))
    rows = rows._replace(active=rows.active & stay)
    begin = (jnp.zeros((), jnp.int32), rows, jnp.full((MOST_STEPS, batch), -1, jnp.int32), told)
    return jax.lax.while_loop(goes_on, one_step, begin)[1:]


def _advance(
    rows: Rows, logits: Float[Array, "B V"], draws: bool, scores: bool
) -> tuple[Rows, Int[Array, " B"], Scores | None]:
    """Gives active rows a token; returns the rows, the tokens, -1 where there is none, and their scores."""
    asked, key = rows.asked, rows.asked.key
    # Rows that share a key are at the same step, those that have ended apart.
    key = jax.vmap(jax.random.fold_in)(key, rows.steps) if key.ndim else jax.random.fold_in(key, jnp.max(rows.steps))
    chosen = sample(logits, key, temperature=asked.temperature if draws else 0.0, top_k=asked.top_k, top_p=asked.top_p)
    given, finite = rows.active.astype(jnp.int32), jnp.all(jnp.isfinite(logits), axis=-1)
    finite = rows.finite & (finite | ~rows.active)
    ends = jnp.any(chosen[:, None] == asked.stop_ids, axis=1) | (rows.steps + given >= asked.most) | ~finite
    advanced = rows._replace(
        tokens=jnp.where(rows.active, chosen, rows.tokens),
        positions=rows.positions + given,
        steps=rows.steps + given,
        active=rows.active & ~ends,
        finite=finite,
    )
    found = None
    if scores:
        scored = partial(_scores, logits, chosen)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(scored))
        found = jax.lax.cond(jnp.any(rows.active & asked.scores), scored, lambda: nothing)
    return advanced, jnp.where(rows.active, chosen, -1), found


def _scores(logits: Float[Array, "n V"], tokens: Int[Array, " n"]) -> Scores:
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(log_probabilities, tokens[:, None], axis=-1)[:, 0]
    return Scores(chosen, *jax.lax.top_k(log_probabilities, min(MOST_SCORES, logits.shape[-1])))


def _score_prompt(model: Decoder, x: Float[Array, "1 T d"], prompt: Int[Array, "1 T"]) -> Scores:
    """A few positions at a time: logits of all of them would take much memory."""
    size = _CHUNK if x.shape[1] % _CHUNK == 0 else x.shape[1]
    targets = jnp.roll(prompt, -1, axis=1)  # the last is scored against the first, and not told

    def chunk(part: tuple[Array, Array]) -> Scores:
        return _scores(model.logits(part[0][None])[0], part[1])

    parts = (x[0].reshape(-1, size, x.shape[2]), targets[0].reshape(-1, size))
    scored = jax.lax.map(chunk, parts)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, 1, *leaf.shape[2:]), scored)


class Block(NamedTuple):
    """Tokens that rows were given in one call, -1 where a row was given none, and scores if the engine scores.

    `finite` are rows whose logits always were finite, `active` those that may be given more.
    """

    tokens: Int[np.ndarray, "n B"]
    finite: Bool[np.ndarray, " B"]
    active: Bool[np.ndarray, " B"]
    scores: Scores | None


class Engine:
    """Runs the programs for one model. Rows belong to the caller, and may have any number.

    Args:
      model: on one device or split over a mesh; its layers are copied unless they are unstacked, or are left in a loop
        (`layer_loop.for_rows`).
      draws: whether any row may have a temperature.
      scores: whether any row may want log-probabilities.

    Attributes:
      mover: moves rows.
      compiles_ahead: whether it can; where rows of a model over a mesh would be is not known before.
    """

    def __init__(self, model: Decoder, *, draws: bool, scores: bool = False):
        self.config = model.config
        model = for_rows(arranged(model))
        self._parts, stacked = nnx.split(model), is_stacked(model)
        self._mesh = mesh_of(self._parts[1])
        self._wanted = {"draws": draws, "scores": scores}
        self._continue = Ahead(continue_rows, {"graphdef": self._parts[0], **self._wanted}, state=self._parts[1])
        self.mover = Mover(model.config, stacked)
        self.compiles_ahead = self._mesh is None
        self._pace = float("inf")

    def room(self, length: int, *, least: int = 16, needed: int | None = None) -> int:
        """Returns the bucket of a length: no more than the model has positions, if these are bounded, but never less
        than is needed, by default the length."""
        size = bucket(length, least=least)
        if not self.config.bounded_positions:
            return size
        return max(needed or length, min(size, self.config.max_positions))

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        asked: Asked,
        cache_length: int | None = None,
        *,
        least: int = 16,
        scores_prompt: bool = False,
        pictures: Pictures | PictureFeatures | None = None,
    ) -> tuple[Rows, Block, Scores | None]:
        """Reads prompts together; returns what `read_prompts` does.

        Args:
          prompts, asked, scores_prompt: as for `read_prompts`.
          cache_length: tokens that the caches have room for; by default the prompts, rounded up.
          least: length that prompts are padded to at least.
          pictures: in the prompts.
        """
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        length = self.room(int(lengths.max()), least=least)
        padded = _padded(prompts, length)
        seen = {}
        if pictures is not None:
            of_pictures, slots = pictures
            name = "pixels" if isinstance(pictures, Pictures) else "features"
            seen = {name: jnp.asarray(of_pictures), "slots": jnp.asarray(_padded(slots, length))}
        with self._over_mesh():
            rows, tokens, scores, of_prompt = read_prompts(
                *self._parts,
                jnp.asarray(padded),
                jnp.asarray(lengths),
                asked,
                cache_length=cache_length or padded.shape[1],
                scores_prompt=scores_prompt,
                **seen,
                **self._wanted,
            )
        return rows, _block(rows, on_host(tokens), scores), of_prompt

    def advance(self, rows: Rows, steps: int, *, stay: Bool[np.ndarray, " B"], least: int = 1) -> tuple[Rows, Block]:
        """Gives rows a block of tokens, as `continue_rows` does; `rows` cannot be used after that."""
        start = time.perf_counter()
        with self._over_mesh():
            rows, tokens, scores = self._continue(
                rows=rows,
                stay=jnp.asarray(stay),
                steps=jnp.int32(steps),
                least=jnp.int32(least),
            )
        given = on_host(tokens)
        made = int((given >= 0).any(axis=1).sum())
        self._pace = (time.perf_counter() - start) / max(made, 1)
        return rows, _block(rows, given[:made], scores)

    def compile(self, before: Rows, size: Size, row_length: int | None = None) -> None:
        """Compiles what it takes to bring rows of some shapes to a size, to put a row there, and to give them tokens.

        To be called in another thread than the one that calls `advance`, and if it `compiles_ahead`.

        Args:
          before: from `shapes_of`.
          row_length: tokens of the row's caches; None: none is put.
        """
        after = self.mover.resized(before, size)
        row = None if row_length is None else self.mover.resized(before, Size(1, row_length))
        self.mover.compile(before, after, row)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        self._continue.compile(
            rows=after,
            stay=jax.ShapeDtypeStruct((size.width,), jnp.bool_),
            steps=number,
            least=number,
        )

    def steps_in(self, seconds: float) -> int:
        """Returns how many tokens a row can be given in so much time, at the pace of the block before; at least 1."""
        return max(1, min(MOST_STEPS, int(seconds / self._pace)))

    def _over_mesh(self) -> AbstractContextManager:
        # Around every program and not around all: between them the caller's code runs.
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)


def _padded(rows: Sequence[Sequence[int]], length: int) -> Int[np.ndarray, "B T"]:
    padded = np.zeros((len(rows), length), np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _block(rows: Rows, tokens: np.ndarray, scores: Scores | None) -> Block:
    return Block(tokens, on_host(rows.finite), on_host(rows.active), scores)
