"""Generation with a KV cache, for batches of prompts of different lengths.

Of a model with an encoder, a prompt is what the encoder is given, once; the decoder begins with its own first token.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from moe_jax.errors import MAX_SIZE, InputError, is_finite
from moe_jax.functional.sampling import sample
from moe_jax.nn import Caches, Decoder, init_cache


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

    Prompts are padded on the right: a row's tokens take the slots 0, 1, ... of its cache, and what padding
    left in later slots is overwritten before it can be seen. A prompt's result does not depend on its neighbours.

    Args:
      model: the decoder.
      prompts: token ids, at least one per prompt.
      max_new_tokens: at most this many are added.
      temperature, top_k, top_p: see `functional.sampling.sample`; temperature 0 is greedy.
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
        model, prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, key=key
    ):
        for row, token in enumerate(tokens.tolist()):
            finished[row] = finished[row] or token in eos_ids
            if not finished[row]:
                results[row].append(token)
        if all(finished):
            break
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
) -> Iterator[Int[np.ndarray, " B"]]:
    """Yields the next token of every row, step after step; the caller decides when to stop. See `generate`."""
    _check(model, prompts, max_new_tokens, temperature, top_k, top_p, key)
    key = jax.random.key(0) if key is None else key
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.zeros((len(prompts), int(lengths.max())), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    graphdef, state = nnx.split(model)
    choose = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p)

    encoder_valid = None
    if model.config.has_encoder:
        source_slots = padded.shape[1]
        caches = init_cache(model.config, len(prompts), max_new_tokens, model.compute_dtype, source_slots=source_slots)
        encoder_valid = jnp.asarray(np.arange(source_slots) < lengths[:, None])
        logits, caches = _encode(graphdef, state, jnp.asarray(padded), encoder_valid, caches)
        lengths = np.ones_like(lengths)
    else:
        caches = init_cache(model.config, len(prompts), padded.shape[1] + max_new_tokens, model.compute_dtype)
        logits, caches = _prefill(graphdef, state, jnp.asarray(padded), jnp.asarray(lengths), caches)
    for step in range(max_new_tokens):
        tokens = choose(logits, jax.random.fold_in(key, step))
        finite = np.asarray(_finite_rows(logits))
        if not finite.all():
            raise NonFiniteLogits(f"prompt {np.argmin(finite) + 1} has logits that are not finite at token {step + 1}")
        yield np.asarray(tokens)
        if step + 1 < max_new_tokens:
            logits, caches = _decode(graphdef, state, tokens, jnp.asarray(lengths + step), caches, encoder_valid)


@jax.jit
def _finite_rows(logits: Float[Array, "B V"]) -> Bool[Array, " B"]:
    return jnp.all(jnp.isfinite(logits), axis=-1)


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _prefill(
    graphdef: nnx.GraphDef, state: nnx.State, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], caches: Caches
) -> tuple[Float[Array, "B V"], Caches]:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
    valid = positions < lengths[:, None]
    out = nnx.merge(graphdef, state)(tokens, positions=positions, valid=valid, caches=caches, last_only=lengths - 1)
    return out.logits[:, 0], out.caches


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _encode(
    graphdef: nnx.GraphDef, state: nnx.State, inputs: Int[Array, "B S"], valid: Bool[Array, "B S"], caches: Caches
) -> tuple[Float[Array, "B V"], Caches]:
    """Runs the encoder, and the decoder on its first token."""
    model = nnx.merge(graphdef, state)
    first = jnp.full((inputs.shape[0], 1), model.config.decoder_start_id, jnp.int32)
    out = model(first, inputs=inputs, inputs_valid=valid, positions=jnp.zeros_like(first), caches=caches)
    return out.logits[:, 0], out.caches


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _decode(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    caches: Caches,
    encoder_valid: Bool[Array, "B S"] | None = None,
) -> tuple[Float[Array, "B V"], Caches]:
    out = nnx.merge(graphdef, state)(
        tokens[:, None], positions=positions[:, None], caches=caches, encoder_valid=encoder_valid
    )
    return out.logits[:, 0], out.caches


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
