"""Log-likelihoods of many continuations: rows of similar length share a batch, and few programs serve all batches."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.sharding import batch_shards, local_rows, make_mesh, place
from moe_jax.evaluation.held_out import run_to_head
from moe_jax.functional.head_chunks import chunk_size
from moe_jax.kernels.hardware import bucket
from moe_jax.nn import Decoder

# Smallest length of a batch, and fewest scored positions: logits of a few more positions are cheaper than another
# program.
_SHORTEST, _FEWEST_SCORED = 32, 8
WHAT = "scoring"


class Continuation(NamedTuple):
    """Attributes:
    context: at least one token; it is not scored.
    tokens: at least one token; all are scored.
    """

    context: Sequence[int]
    tokens: Sequence[int]


class Likelihood(NamedTuple):
    """Attributes:
    log_likelihood: of the continuation given the context, natural logarithm.
    is_greedy: whether every token of it is the most likely one at its place.
    """

    log_likelihood: float
    is_greedy: bool


class Likelihoods:
    """Scores continuations with a model.

    Args:
      max_length: most tokens of an input; the beginning of a longer row is left out.
      batch_size: rows computed at once, rounded up to a multiple of the mesh's batch shards. Affects only the last bits
        of the result.
      mesh: the mesh that the model is on; None: the first device of this process.

    Raises:
      InputError: if the model has an encoder, or a head for classes.
    """

    def __init__(self, model: Decoder, *, max_length: int, batch_size: int, mesh: Mesh | None = None):
        model.config.check_no_encoder("a log-likelihood of a continuation")
        model.config.check_scores_tokens("a log-likelihood of a continuation")
        if batch_size < 1 or max_length < 1:
            raise InputError(f"{batch_size=} and {max_length=} must be at least 1")
        self._config, self._max_length = model.config, max_length
        self._graphdef, self._state = nnx.split(model)
        self._mesh = make_mesh({}, jax.local_devices()[:1]) if mesh is None else mesh
        shards = batch_shards(self._mesh.shape)
        self._batch_size = -(-batch_size // shards) * shards

    def __call__(
        self,
        asked: Sequence[Continuation],
        progress: Progress = no_progress,
        answered: Callable[[int, Likelihood], object] = lambda index, answer: None,
    ) -> list[Likelihood]:
        """Returns the likelihood of every continuation; equal ones are computed once.

        `answered` is called with the index of a continuation and its answer as soon as that is known.

        Raises:
          InputError: if a context or a continuation is empty, a continuation is longer than `max_length`, or logits are
            not finite.
        """
        places: dict[_Row, list[int]] = {}
        for index, one in enumerate(asked):
            places.setdefault(self._checked(one), []).append(index)
        rows = sorted(places, key=lambda row: (-len(row[0]), row))
        answers: dict[int, Likelihood] = {}
        score, local = _compiled(self._graphdef, self._mesh), local_rows(self._mesh, self._batch_size)
        progress(WHAT, 0, len(asked))
        with jax.set_mesh(self._mesh):
            for chunk, scored in self._chunks(rows):
                batch = {name: array[local] for name, array in self._batch(chunk, scored).items()}
                losses, greedy = map(np.asarray, score(self._state, place(batch, local, self._mesh, self._batch_size)))
                if not np.isfinite(losses[: len(chunk)]).all():
                    raise InputError("log-likelihoods are not finite: the weights, or what they give, are not")
                for row, loss, is_greedy in zip(chunk, losses.tolist(), greedy.tolist(), strict=False):
                    for index in places[row]:
                        answers[index] = Likelihood(-loss, is_greedy)
                        answered(index, answers[index])
                progress(WHAT, len(answers), len(asked))
        return [answers[index] for index in range(len(asked))]

    def _checked(self, one: Continuation) -> "_Row":
        """Returns a continuation's row: its tokens, cut to the longest input, and how many of the last are scored."""
        context, tokens = tuple(one.context), tuple(one.tokens)
        if not context or not tokens:
            raise InputError("a log-likelihood takes at least one token of context and one that is scored")
        if len(tokens) > self._max_length:
            raise InputError(f"{len(tokens):,} tokens to score are more than the {self._max_length:,} that fit")
        outside = [token for token in (*context, *tokens) if not 0 <= token < self._config.vocab_size]
        if outside:
            raise InputError(f"token ids {outside[:5]} lie outside the vocabulary of {self._config.vocab_size}")
        return (*context, *tokens)[-(self._max_length + 1) :], len(tokens)

    def _chunks(self, rows: Sequence["_Row"]) -> Iterator[tuple[list["_Row"], int]]:
        """Yields rows with lengths of the same bucket, at most a batch, and the scored positions, padding included."""
        groups: dict[int, list[_Row]] = {}
        for row in rows:
            groups.setdefault(self._length(row), []).append(row)
        for group in groups.values():
            # One program for them all.
            most = max(scored for _, scored in group)
            scored = max(_FEWEST_SCORED, 1 << (most - 1).bit_length())
            for start in range(0, len(group), self._batch_size):
                yield group[start : start + self._batch_size], min(scored, self._length(group[0]))

    def _length(self, row: "_Row") -> int:
        size = bucket(len(row[0]) - 1, least=_SHORTEST)
        return min(size, self._max_length) if self._config.bounded_positions else size

    def _batch(self, rows: Sequence["_Row"], most_scored: int) -> dict[str, np.ndarray]:
        """Returns rows padded on the right, and empty rows up to the size of a batch."""
        tokens, inside = np.zeros((2, self._batch_size, self._length(rows[0])), np.int32)
        at, targets = np.zeros((2, self._batch_size, most_scored), np.int32)
        counts = np.zeros((self._batch_size, most_scored), bool)
        for index, (ids, scored) in enumerate(rows):
            length = len(ids) - 1
            tokens[index, :length], inside[index, :length] = ids[:-1], 1
            at[index, :scored] = np.arange(length - scored, length)
            targets[index, :scored], counts[index, :scored] = ids[-scored:], True
        return {"tokens": tokens, "segment_ids": inside, "at": at, "targets": targets, "counts": counts}


_Row = tuple[tuple[int, ...], int]
"""Tokens, of which the last is only predicted, and how many of the last are scored."""


@functools.lru_cache(maxsize=16)
def _compiled(graphdef: nnx.GraphDef, mesh: Mesh) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def score(state: nnx.State, batch: dict[str, Array]) -> tuple[Array, Array]:
        model = nnx.merge(graphdef, state)
        x = run_to_head(model, {"tokens": batch["tokens"], "segment_ids": batch["segment_ids"]}).x
        x = jnp.take_along_axis(x, batch["at"][:, :, None], axis=1)
        losses, likeliest = _losses_and_likeliest(model, x, batch["targets"])
        counts = batch["counts"]
        total = jnp.sum(jnp.where(counts, losses, jnp.zeros_like(losses)), axis=1)
        return total, jnp.all((likeliest == batch["targets"]) | ~counts, axis=1)

    return jax.jit(score, out_shardings=NamedSharding(mesh, P()))


def _losses_and_likeliest(
    model: Decoder, x: Float[Array, "B K d"], targets: Int[Array, "B K"]
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """Computes a few columns at a time, whose logits are not large."""
    rows, columns = targets.shape
    size = max(1, min(columns, chunk_size(rows * columns, model.config.vocab_size) // rows))
    chunks = -(-columns // size)
    padding = chunks * size - columns

    def of_chunk(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = model.logits(chunk[0])
        chosen = jnp.take_along_axis(logits, chunk[1][:, :, None], axis=-1)[:, :, 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    x = jnp.pad(x, ((0, 0), (0, padding), (0, 0))).reshape(rows, chunks, size, -1)
    wanted = jnp.pad(targets, ((0, 0), (0, padding))).reshape(rows, chunks, size)
    found = jax.lax.map(of_chunk, (jnp.moveaxis(x, 1, 0), jnp.moveaxis(wanted, 1, 0)))
    losses, likeliest = (jnp.moveaxis(one, 0, 1).reshape(rows, chunks * size)[:, :columns] for one in found)
    return losses, likeliest
