"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464, section 3), in chunks and token by token.

Every head has a state S [K, V], float32. A token with key k and query q, both of length 1, value v, share beta (from 0
to 1) and log-decay g <= 0 changes it and reads it:

    S <- exp(g) S;    S <- S + k (beta (v - S^T k))^T;    o = S^T q / sqrt(K)

In chunks of C tokens (section 3.3 there; Yang et al. 2024, arXiv:2406.06484) all that the tokens of a chunk do to each
other is a unit lower triangular system, and what is left of the recurrence runs over chunks. So memory grows with the
length, and nearly all arithmetic is products of matrices.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from moe_jax.functional.recurrent.chunks import (
    CHUNK,
    decays_of,
    document_begins,
    product_in,
    zero_at_padding,
)

GROUP = 16
"""Chunks that are worked on at a time: more need more memory, fewer leave a large device idle."""
_BLOCK = 16
_EPS = 1e-6


class DeltaInputs(NamedTuple):
    """Everything that tokens bring to the rule. H heads have states; of queries and keys there may be fewer, G of them.

    Attributes:
      q, k: queries and keys, of any length.
      v: values.
      beta: shares, float32.
      log_decay: logarithms of the decay, float32, at most 0.
    """

    q: Float[Array, "B T G K"]
    k: Float[Array, "B T G K"]
    v: Float[Array, "B T H V"]
    beta: Float[Array, "B T H"]
    log_decay: Float[Array, "B T H"]


def delta_rule(
    inputs: DeltaInputs, state: Float[Array, "B H K V"] | None = None, documents: Int[Array, "B T"] | None = None
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Applies the rule; returns what the queries read, in the dtype of the values, and the state after the last token.

    Args:
      inputs: of all tokens.
      state: before the first token, float32; None: zeros.
      documents: document of every token, counted from 1; 0 is padding, which does nothing to the state, and reads
        something that means nothing. A document begins with a state of zeros, but for the first of a row, which goes on
        from `state`. None: a row is one document.
    """
    batch, length, heads, width = inputs.v.shape
    if state is None:
        state = jnp.zeros((batch, heads, inputs.k.shape[-1], width), jnp.float32)
    if length > 1:
        return _in_groups(inputs, state, documents)
    state, read = _step(state, jax.tree.map(lambda one: one[:, 0], _prepared(inputs, documents)))
    return read[:, None].astype(inputs.v.dtype), state


def plain_delta_rule(
    inputs: DeltaInputs, state: Float[Array, "B H K V"], documents: Int[Array, "B T"] | None = None
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Does the same token by token: the reference of `delta_rule`, and the definition of it."""
    dtype = inputs.v.dtype
    inputs = _prepared(inputs, documents)
    begins = jnp.zeros(inputs.beta.shape[:2], bool) if documents is None else document_begins(documents)

    def step(state: Array, given: tuple[DeltaInputs, Array]) -> tuple[Array, Array]:
        one, begins = given
        return _step(jnp.where(begins[:, None, None, None], 0.0, state), one)

    by_token = jax.tree.map(lambda one: jnp.moveaxis(one, 1, 0), (inputs, begins))
    state, read = jax.lax.scan(step, state, by_token)
    return jnp.moveaxis(read, 0, 1).astype(dtype), state


def _prepared(inputs: DeltaInputs, documents: Int[Array, "B T"] | None) -> DeltaInputs:
    """Returns the inputs in float32, with queries and keys of length 1 for every head; padding changes nothing."""
    each = inputs.v.shape[2] // inputs.k.shape[2]
    if documents is not None:
        # Before anything else, and not only shares and decays: what stands at padding may not be finite, and neither
        # its length nor the gradient of that would be.
        inputs = jax.tree.map(partial(zero_at_padding, documents=documents), inputs)
    q, k = (_of_length_one(one) for one in (inputs.q, inputs.k))
    q = q * jnp.float32(q.shape[-1] ** -0.5)
    if each > 1:
        q, k = (jnp.repeat(one, each, axis=2) for one in (q, k))
    v, beta, log_decay = (one.astype(jnp.float32) for one in inputs[2:])
    return DeltaInputs(q, k, v, beta, log_decay)


def _of_length_one(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.float32(_EPS))


def _step(state: Float[Array, "B H K V"], one: DeltaInputs) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """Returns the state after a token, and what its query reads."""
    state = state * jnp.exp(one.log_decay)[:, :, None, None]
    held = jnp.sum(state * one.k[..., None], axis=2)
    change = one.beta[..., None] * (one.v - held)
    state = state + one.k[..., None] * change[:, :, None, :]
    return state, jnp.sum(state * one.q[..., None], axis=2)


# --- chunks ---------------------------------------------------------------------------------------


class _Chunks(NamedTuple):
    """Everything about chunks that does not depend on the state before them; the leading axis counts chunks.

    Attributes:
      values: of the changes, if the state before were zero.
      reads: keys by which the state before is subtracted from them.
      queries: that read the state before.
      within: how much of the change of a token another one's query reads.
      keys: with which changes are added to the state after.
      decay: of the state before.
    """

    values: Float[Array, "N B H C V"]
    reads: Float[Array, "N B H C K"]
    queries: Float[Array, "N B H C K"]
    within: Float[Array, "N B H C C"]
    keys: Float[Array, "N B H C K"]
    decay: Float[Array, "N B H"]


def _in_groups(
    inputs: DeltaInputs, state: Float[Array, "B H K V"], documents: Int[Array, "B T"] | None
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Applies the rule to some chunks after the others, of which only inputs and states are kept for the gradient."""
    batch, length = inputs.v.shape[:2]
    size = min(CHUNK, max(_BLOCK, 1 << (length - 1).bit_length()))
    count = -(-length // size)
    groups = -(-count // GROUP)
    tokens = -(-count // groups) * size

    def grouped(one: Array) -> Array:
        one = jnp.pad(one, [(0, 0), (0, groups * tokens - length)] + [(0, 0)] * (one.ndim - 2))
        return jnp.moveaxis(one.reshape(batch, groups, tokens, *one.shape[2:]), 1, 0)

    def next_group(state: Array, group: tuple[DeltaInputs, Array | None, Array | None]) -> tuple[Array, Array]:
        given, names, begins = group
        read, state = _in_chunks(_prepared(given, names), state, begins, size, inputs.v.dtype)
        return state, read

    begins = None if documents is None else document_begins(documents)
    given = jax.tree.map(grouped, (inputs, documents, begins))
    state, read = jax.lax.scan(jax.checkpoint(next_group, prevent_cse=False), state, given)
    read = jnp.moveaxis(read, 0, 1)
    return read.reshape(batch, groups * tokens, *read.shape[3:])[:, :length], state


def _in_chunks(
    inputs: DeltaInputs, state: Float[Array, "B H K V"], begins: Bool[Array, "B T"] | None, size: int, dtype: DTypeLike
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Applies the rule to whole chunks of so many tokens, given `_prepared` inputs."""
    batch, length, heads, width = inputs.v.shape

    def chunked(one: Array) -> Array:
        """[B, T, ...] -> [N, B, ..., C], with what is left of a width last."""
        one = one.reshape(batch, -1, size, *one.shape[2:])
        return jnp.moveaxis(one, (1, 2), (0, -1 if one.ndim == 4 else -2 if one.ndim == 5 else 2))

    of_chunk = None if begins is None else jnp.cumsum(chunked(begins).astype(jnp.int32), axis=-1)
    chunks = _between_tokens(DeltaInputs(*map(chunked, inputs)), of_chunk, dtype)

    def next_chunk(state: Array, one: _Chunks) -> tuple[Array, Array]:
        change = one.values - product_in("bhck,bhkv->bhcv", one.reads, state, dtype)
        read = product_in("bhck,bhkv->bhcv", one.queries, state, dtype)
        read = read + product_in("bhcd,bhdv->bhcv", one.within, change, dtype)
        added = product_in("bhck,bhcv->bhkv", one.keys, change, dtype)
        return state * one.decay[..., None, None] + added, read.astype(dtype)

    state, read = jax.lax.scan(next_chunk, state, chunks)
    return jnp.moveaxis(read, (0, 3), (1, 2)).reshape(batch, length, heads, width), state


def _between_tokens(parts: DeltaInputs, documents: Int[Array, "N B C"] | None, dtype: DTypeLike) -> _Chunks:
    """Solves what the tokens of a chunk do to each other; `documents` counts those that begin within the chunk."""
    size = parts.beta.shape[-1]
    place = np.arange(size)
    is_before = jnp.asarray(place[:, None] >= place[None, :])[None, None, None]
    goes_on = ends = None
    if documents is not None:
        is_before = is_before & (documents[..., :, None] == documents[..., None, :])[:, :, None]
        goes_on, ends = ((documents == one)[:, :, None] for one in (0, documents[..., -1:]))
    between, since, until = decays_of(parts.log_decay, is_before)
    decay = since[..., -1]
    if goes_on is not None and ends is not None:
        since, until = jnp.where(goes_on, since, 0.0), jnp.where(ends, until, 0.0)
        decay = jnp.where(goes_on[..., -1], decay, 0.0)
    shared = parts.k * parts.beta[..., None]
    alike = product_in("nbhck,nbhdk->nbhcd", shared, parts.k, jnp.float32)
    inverse = inverse_of_unit_lower(alike * between)
    return _Chunks(
        values=product_in("nbhcd,nbhdv->nbhcv", inverse, parts.v * parts.beta[..., None], dtype),
        reads=product_in("nbhcd,nbhdk->nbhck", inverse, shared * since[..., None], dtype),
        queries=parts.q * since[..., None],
        within=product_in("nbhck,nbhdk->nbhcd", parts.q, parts.k, dtype) * between,
        keys=parts.k * until[..., None],
        decay=decay,
    )


@jax.custom_vjp
def inverse_of_unit_lower(x: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """Returns the inverse of `I + L`, L what is below the diagonal of `x`, float32; C is 16 times a power of two.

    The inverse of blocks is that of blocks half as large, and a product for the corner between two of them. Within 16
    rows all such corners are made at a time, in products of whole blocks.
    """
    size = x.shape[-1]
    blocks = _inverse_of_blocks(jnp.stack([x[..., i : i + _BLOCK, i : i + _BLOCK] for i in range(0, size, _BLOCK)], -3))
    width = _BLOCK
    while width < size:
        first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        below = [x[..., i + width : i + 2 * width, i : i + width] for i in range(0, size, 2 * width)]
        corner = -_matmul(_matmul(second, jnp.stack(below, axis=-3)), first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        blocks = jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return blocks[..., 0, :, :]


def _inverse_of_blocks(x: Float[Array, "... n b b"]) -> Float[Array, "... n b b"]:
    """Returns the inverse of `I + L` for every block."""
    size = x.shape[-1]
    place = np.arange(size)
    inverse, width = jnp.broadcast_to(jnp.asarray(np.eye(size, dtype=np.float32)), x.shape), 1
    while width < size:
        pair, half = place // (2 * width), place // width
        is_corner = (pair[:, None] == pair[None, :]) & (half[:, None] > half[None, :])
        corners = jnp.where(jnp.asarray(is_corner), x, 0.0)
        inverse = inverse - (corners if width == 1 else _matmul(_matmul(inverse, corners), inverse))
        width *= 2
    return inverse


def _inverse_forward(x: Array) -> tuple[Array, Array]:
    inverse = inverse_of_unit_lower(x)
    return inverse, inverse


def _inverse_backward(inverse: Array, cotangent: Array) -> tuple[Array]:
    turned = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_matmul(_matmul(turned, cotangent), turned), -1),)


inverse_of_unit_lower.defvjp(_inverse_forward, _inverse_backward)


def _matmul(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision="highest")
