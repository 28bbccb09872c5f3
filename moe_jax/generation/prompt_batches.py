"""Generation with a KV cache, for batches of prompts of different lengths.

Of a model with an encoder, a prompt is what the encoder is given, once; the decoder begins with its own first token.

Lengths are rounded up to buckets, for which programs are compiled, and tokens come in blocks: the first at once, then
ever more together. Neither changes a result.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Int, PRNGKeyArray

from moe_jax.core.errors import MAX_SIZE, InputError, is_finite
from moe_jax.distributed.processes import on_host
from moe_jax.distributed.sharding import mesh_of
from moe_jax.functional.buckets import bucket
from moe_jax.generation.decoding import MOST_STEPS, Choosing, Sampling, begin, continue_rows
from moe_jax.models import ModelConfig
from moe_jax.nn import Decoder, unstacked

FIRST_BLOCK = 8
"""Tokens after the first one that come together; the blocks after them are longer."""


class NonFiniteLogits(InputError):
    """Logits are NaN or infinite: no token can be chosen by them."""


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: PRNGKeyArray | None = None,
    eos_ids: Sequence[int] = (),
) -> list[list[int]]:
    """Continues every prompt, or with an encoder answers it.

    Prompts are padded on the right: a row's tokens take the slots 0, 1, ... of its cache, and what padding left in
    later slots is overwritten before it can be seen. A prompt's result does not depend on its neighbours.

    The layers of a model that is stacked are copied into arrays of their own first, which takes as much memory again;
    of a model that was loaded for generation (`load_model(..., stacked=False)`) they need not be.

    Args:
      model: the decoder.
      prompts: token ids, at least one per prompt.
      max_new_tokens: at most this many are added.
      temperature, top_k, top_p: see `functional.heads.sampling.sample`; temperature 0 is greedy.
      key: needed unless greedy.
      eos_ids: a row ends before the first of these; they are not returned.

    Returns:
      The new tokens of every prompt.

    Raises:
      InputError: for an empty prompt, ids outside the vocabulary, or bad sampling options.
      NonFiniteLogits: if logits are not finite.
    """
    finished = [False] * len(prompts)
    results: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        key=key,
        eos_ids=eos_ids,
    ):
        for row, token in enumerate(tokens.tolist()):
            finished[row] = finished[row] or token in eos_ids
            if not finished[row]:
                results[row].append(token)
    return results


def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: PRNGKeyArray | None = None,
    eos_ids: Sequence[int] = (),
    ended: Bool[np.ndarray, " B"] | None = None,
    seconds: float | None = None,
) -> Iterator[Int[np.ndarray, " B"]]:
    """Yields the next token of every row, step after step, until every row was given one of `eos_ids` or has ended.

    The first comes at once, the others in blocks, which grow. A row goes on beyond its own end as long as others do.

    Args:
      ended: rows that the caller wants no more of, which it may say while it is given tokens; looked at before a block.
      seconds: that a block should take, so that somebody can read along; None: blocks are as long as they can be.

    The other arguments, and errors: see `generate`.
    """
    _check(model, prompts, max_new_tokens, temperature, top_k, top_p, key)
    key = jax.random.key(0) if key is None else key
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.zeros((len(prompts), _bucket(int(lengths.max()), model.config)), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    if model.config.has_encoder:
        slots = _bucket(max_new_tokens, model.config)
    else:
        slots = _bucket(padded.shape[1] + max_new_tokens, model.config, needed=int(lengths.max()) + max_new_tokens)
    choosing = Choosing(temperature == 0.0, None if temperature == 0.0 else top_k, bool(temperature and top_p))
    stop_ids = np.full(bucket(len(eos_ids), least=4), -1, np.int32)
    stop_ids[: len(eos_ids)] = eos_ids
    sampling = Sampling(key, jnp.float32(temperature), jnp.float32(top_p or 1.0), jnp.asarray(stop_ids))

    parts = nnx.split(unstacked(model))
    mesh = mesh_of(parts[1])

    def over_mesh() -> AbstractContextManager:
        # Around every program and not around all: between them the caller's code runs.
        return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)

    with over_mesh():
        progress = begin(*parts, jnp.asarray(padded), jnp.asarray(lengths), sampling, choosing=choosing, slots=slots)
    yield _checked(on_host(progress.tokens), on_host(progress.finite), 1)
    done, block_size = 1, FIRST_BLOCK
    while done < max_new_tokens:
        if not bool(progress.goes_on()) or (ended is not None and bool((ended | on_host(progress.stopped)).all())):
            return
        until, start = min(max_new_tokens, done + block_size), time.perf_counter()
        with over_mesh():
            progress, block = continue_rows(*parts, progress, sampling, jnp.int32(until), choosing=choosing)
        tokens, finite, step = on_host(block), on_host(progress.finite), int(progress.step)
        block_size = MOST_STEPS
        if seconds is not None:
            block_size = max(1, min(MOST_STEPS, int(seconds * (step - done) / (time.perf_counter() - start))))
        for row in range(step - done):
            is_last = done + row + 1 == step
            yield _checked(tokens[row], finite if is_last else np.ones_like(finite), done + row + 1)
        done = step


def _checked(tokens: Int[np.ndarray, " B"], finite: Bool[np.ndarray, " B"], step: int) -> Int[np.ndarray, " B"]:
    if not finite.all():
        raise NonFiniteLogits(f"prompt {np.argmin(finite) + 1} has logits that are not finite at token {step}")
    return tokens


def _bucket(length: int, config: ModelConfig, *, needed: int | None = None) -> int:
    """The bucket of a length, or less where the model has only so many positions, but not less than is needed."""
    size = bucket(length)
    return max(needed or length, min(size, config.max_positions)) if config.bounded_positions else size


def _check(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    key: PRNGKeyArray | None,
) -> None:
    model.config.check_scores_tokens("generation")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise InputError("generation needs at least one token in every prompt; give a text, or the BOS token")
    vocab_size = model.config.vocab_size
    outside = sorted({token for prompt in prompts for token in prompt if not 0 <= token < vocab_size})
    if outside:
        raise InputError(f"token ids {outside[:5]} lie outside the vocabulary of {vocab_size}")
    if max_new_tokens < 1:
        raise InputError(f"{max_new_tokens=} must be at least 1")
    if max_new_tokens > MAX_SIZE:
        raise InputError(f"{max_new_tokens=} must be at most {MAX_SIZE:,}")
    if not (is_finite(temperature) and temperature >= 0):
        raise InputError(f"{temperature=} must be 0 (greedy) or above")
    if top_k is not None and top_k < 1:
        raise InputError(f"{top_k=} must be at least 1, or left out")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"{top_p=} must lie in (0, 1], or be left out")
    if temperature > 0 and key is None:
        raise InputError("sampling with a temperature needs a random key")
