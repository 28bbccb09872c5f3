"""The engine of tokens: rows of one model, read and continued in blocks; by `generate` and by `serve`."""

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Int

from moe_jax.distributed.processes import on_host
from moe_jax.distributed.sharding import mesh_of
from moe_jax.functional.buckets import bucket
from moe_jax.generation.rows import MOST_STEPS, Asked, Rows, Scores, continue_rows, read_prompts
from moe_jax.nn import Decoder, decoder


class Block(NamedTuple):
    """Tokens that rows were given in one call.

    Attributes:
      tokens: of every step; -1 where a row was given none.
      finite: rows whose logits always were finite.
      active: rows that may be given more.
      scores: of the tokens; None unless the engine scores.
    """

    tokens: Int[np.ndarray, "n B"]
    finite: Bool[np.ndarray, " B"]
    active: Bool[np.ndarray, " B"]
    scores: Scores | None


class Engine:
    """Runs the programs of `rows` for one model. Rows belong to the caller, and may have any number.

    Attributes:
      config: of the model.
    """

    def __init__(self, model: Decoder, *, draws: bool, scores: bool = False):
        """Takes a model; its layers are copied unless they are unstacked.

        Args:
          model: the model, on one device or split over a mesh.
          draws: whether any row may have a temperature.
          scores: whether any row may want log-probabilities.
        """
        self.config = model.config
        self._parts = nnx.split(decoder(model))
        self._mesh = mesh_of(self._parts[1])
        self._wanted = {"draws": draws, "scores": scores}
        self._pace = float("inf")

    def room(self, length: int, *, least: int = 16, needed: int | None = None) -> int:
        """Returns the bucket of a length; where the model has only so many positions, no more than these, but never
        less than is needed: by default the length."""
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
    ) -> tuple[Rows, Block, Scores | None]:
        """Reads prompts together.

        Args:
          prompts: token ids.
          asked: how the rows are continued.
          cache_length: tokens that the caches have room for; by default the prompts, rounded up.
          least: length that prompts are padded to at least.
          scores_prompt: whether the prompt, of which there is one, is scored.

        Returns:
          The rows; the first token of every row; the scores of the prompt, if they are wanted.
        """
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        padded = np.zeros((len(prompts), self.room(int(lengths.max()), least=least)), np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        with self._over_mesh():
            rows, tokens, scores, of_prompt = read_prompts(
                *self._parts,
                jnp.asarray(padded),
                jnp.asarray(lengths),
                asked,
                cache_length=cache_length or padded.shape[1],
                scores_prompt=scores_prompt,
                **self._wanted,
            )
        return rows, _block(rows, on_host(tokens), scores), of_prompt

    def advance(self, rows: Rows, steps: int, *, stay: Bool[np.ndarray, " B"], least: int = 1) -> tuple[Rows, Block]:
        """Gives rows a block of tokens; `rows` cannot be used after that. Arguments as of `rows.continue_rows`."""
        start = time.perf_counter()
        with self._over_mesh():
            rows, tokens, scores = continue_rows(
                *self._parts, rows, jnp.asarray(stay), jnp.int32(steps), jnp.int32(least), **self._wanted
            )
        given = on_host(tokens)
        made = int((given >= 0).any(axis=1).sum())
        self._pace = (time.perf_counter() - start) / max(made, 1)
        return rows, _block(rows, given[:made], scores)

    def steps_in(self, seconds: float) -> int:
        """Returns how many tokens a row can be given in so much time, at the pace of the block before; at least 1."""
        return max(1, min(MOST_STEPS, int(seconds / self._pace)))

    def _over_mesh(self) -> AbstractContextManager:
        # Around every program and not around all: between them the caller's code runs.
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)


def _block(rows: Rows, tokens: np.ndarray, scores: Scores | None) -> Block:
    return Block(tokens, on_host(rows.finite), on_host(rows.active), scores)
