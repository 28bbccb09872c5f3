"""The scan of Mamba-2 in chunks against its definition token by token: results, states and gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.functional.recurrent.state_space import ScanInputs, state_scan
from tests.support.numerics import assert_close

LENGTH = 150  # two chunks and a part of one


def token_by_token(inputs, state, documents):
    """With a state of zeros where a document begins; padding is passed."""
    each = inputs.v.shape[2] // inputs.k.shape[2]
    q, k = (jnp.repeat(one, each, axis=2) for one in inputs[:2])

    def step(carry, given):
        state, last = carry
        q, k, v, log_decay, document = given
        begins = (document > 0) & (last >= 0) & (last != document)
        state = jnp.where(begins[:, None, None, None], 0.0, state)
        new = jnp.exp(log_decay)[..., None, None] * state + k[..., None] * v[:, :, None, :]
        state = jnp.where((document > 0)[:, None, None, None], new, state)
        read = jnp.einsum("bhn,bhnp->bhp", q, state, precision="highest")
        return (state, jnp.where(document > 0, document, last)), read

    by_token = [jnp.moveaxis(one, 1, 0) for one in (q, k, inputs.v, inputs.log_decay, documents)]
    (state, _), read = jax.lax.scan(step, (state, jnp.full(state.shape[0], -1, jnp.int32)), by_token)
    return jnp.moveaxis(read, 0, 1), state


def test_chunks_give_what_tokens_give(strict_numerics):
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((2, LENGTH, 2, 3)).astype(np.float32) for _ in range(2))
    v, state = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, LENGTH, 4, 5), (2, 4, 3, 5)))
    log_decay = -np.exp(rng.standard_normal((2, LENGTH, 4)) - 1).astype(np.float32)
    # One document with padding inside and behind; and two behind padding, the second across chunks.
    documents = np.asarray(
        [[1] * 50 + [0] * 3 + [1] * 80 + [0] * 17, [0] * 5 + [1] * 40 + [2] * (LENGTH - 45)], np.int32
    )
    weights = rng.standard_normal(v.shape).astype(np.float32)

    def results(scan):
        def value(inputs, state, documents):
            read, after = scan(inputs, state, documents)
            read = jnp.where((documents > 0)[..., None, None], read, 0.0)
            return jnp.sum(read * weights) + jnp.sum(after), (read, after)

        given = ScanInputs(*map(jnp.asarray, (q, k, v, log_decay))), jnp.asarray(state), jnp.asarray(documents)
        return jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))(*given)

    assert_close(results(state_scan), results(token_by_token))
