"""The state-space duality of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, sections 5 and 6), in chunks.

Every head has a state S [N, P], float32. A token with key k, query q, value v and log-decay g <= 0 changes it and
reads it:

    S <- exp(g) S + k v^T;    o = S^T q

In the paper's words k is B, q is C, v is x times the step, and g is A times the step. In chunks of C tokens, what the
tokens of a chunk read of each other is a masked product (section 6), and the recurrence runs over chunks.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.functional.recurrent.chunks import (
    CHUNK,
    decays_of,
    document_begins,
    product_in,
    zero_at_padding,
)


class ScanInputs(NamedTuple):
    """Inputs of the scan, of all tokens. H heads have states; of queries and keys there may be fewer, G of them.

    Attributes:
      q, k: queries and keys.
      v: values.
      log_decay: logarithms of the decay, float32, at most 0.
    """

    q: Float[Array, "B T G N"]
    k: Float[Array, "B T G N"]
    v: Float[Array, "B T H P"]
    log_decay: Float[Array, "B T H"]


def state_scan(
    inputs: ScanInputs, state: Float[Array, "B H N P"], documents: Int[Array, "B T"] | None = None
) -> tuple[Float[Array, "B T H P"], Float[Array, "B H N P"]]:
    """Returns what the queries read, float32, and the state after the last token.

    Args:
      inputs: of all tokens; products are of operands rounded to the dtype of the queries, and summed in float32.
      state: before the first token, float32.
      documents: document of every token, counted from 1; 0 is padding, which does nothing to the state, and reads
        something that means nothing. A document begins with a state of zeros, but for the first of a row, which goes on
        from `state`. None: a row is one document.
    """
    dtype, length = inputs.q.dtype, inputs.q.shape[1]
    size = min(CHUNK, length)
    begins = jnp.zeros(inputs.q.shape[:2], bool)
    if documents is not None:
        # All of them, and not only decays and values: what stands at padding may not be finite.
        begins, inputs = document_begins(documents), jax.tree.map(partial(zero_at_padding, documents=documents), inputs)

    def chunked(one: Array) -> Array:
        one = jnp.pad(one, [(0, 0), (0, -length % size)] + [(0, 0)] * (one.ndim - 2))
        return jnp.moveaxis(one.reshape(one.shape[0], -1, size, *one.shape[2:]), 1, 0)

    def next_chunk(state: Array, given: tuple[ScanInputs, Array]) -> tuple[Array, Array]:
        return _chunk(*given, state, dtype)

    # The backward pass makes the products between the tokens of a chunk again.
    one_chunk = jax.checkpoint(next_chunk, prevent_cse=False)
    state, read = jax.lax.scan(one_chunk, state, jax.tree.map(chunked, (inputs, begins)))
    read = jnp.moveaxis(read, 0, 1)
    return read.reshape(read.shape[0], -1, *read.shape[3:])[:, :length], state


def plain_state_scan(
    inputs: ScanInputs, state: Float[Array, "B H N P"], documents: Int[Array, "B T"] | None = None
) -> tuple[Float[Array, "B T H P"], Float[Array, "B H N P"]]:
    """Does the same token by token, in float32: the reference of `state_scan`, and the definition of it."""
    if documents is None:
        documents = jnp.ones(inputs.q.shape[:2], jnp.int32)
    each = inputs.v.shape[2] // inputs.k.shape[2]

    def step(state: Array, given: tuple[ScanInputs, Array, Array]) -> tuple[Array, Array]:
        one, begins, counted = given
        q, k = (jnp.repeat(of_group.astype(jnp.float32), each, axis=1) for of_group in (one.q, one.k))
        begins, counted = (flag[:, None, None, None] for flag in (begins, counted))
        kept = jnp.where(begins, 0.0, state) * jnp.exp(one.log_decay)[..., None, None]
        after = jnp.where(counted, kept + k[..., None] * one.v.astype(jnp.float32)[:, :, None], state)
        return after, jnp.sum(after * q[..., None], axis=2)

    inputs = jax.tree.map(partial(zero_at_padding, documents=documents), inputs)
    given = (inputs, document_begins(documents), documents > 0)
    state, read = jax.lax.scan(step, state, jax.tree.map(lambda one: jnp.moveaxis(one, 1, 0), given))
    return jnp.moveaxis(read, 0, 1), state


def _chunk(
    inputs: ScanInputs, begins: Array, state: Float[Array, "B H N P"], dtype: DTypeLike
) -> tuple[Float[Array, "B H N P"], Float[Array, "B C H P"]]:
    """Returns the state after a chunk, and what its queries read."""
    each = inputs.v.shape[2] // inputs.k.shape[2]
    # Heads before tokens: XLA:CPU has no bfloat16 products for some other orders.
    q, k = (jnp.repeat(one, each, axis=2).transpose(0, 2, 1, 3) for one in (inputs.q, inputs.k))
    v = inputs.v.transpose(0, 2, 1, 3)
    documents = jnp.cumsum(begins.astype(jnp.int32), axis=1)
    place = np.arange(begins.shape[1])
    is_before = jnp.asarray(place[:, None] >= place[None, :])[None]
    is_before = (is_before & (documents[:, :, None] == documents[:, None, :]))[:, None]
    between, since, until = decays_of(inputs.log_decay.transpose(0, 2, 1), is_before)
    goes_on, ends = (documents == 0)[:, None], (documents == documents[:, -1:])[:, None]
    since = jnp.where(goes_on, since, 0.0)
    until = jnp.where(ends, until, 0.0)
    within = product_in("bhcn,bhdn->bhcd", q, k, dtype) * between
    read = product_in("bhcd,bhdp->bhcp", within, v, dtype)
    read = read + product_in("bhcn,bhnp->bhcp", q, state, dtype) * since[..., None]
    added = product_in("bhcn,bhcp->bhnp", k, v.astype(jnp.float32) * until[..., None], dtype)
    return state * since[..., -1:, None] + added, read.transpose(0, 2, 1, 3)
