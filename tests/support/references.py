"""What layers compute, written down in the plainest way: tests of every platform compare with it."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.functional.dense import ffn


def attention_reference(q, k, v, seen, soft_cap=None):
    """Softmax attention [B, T, H, D] of whole score matrices; `seen` Bool[B or 1, T, S] are the keys of each query."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, repeats, axis=2) for a in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.float32(np.sqrt(q.shape[-1]))
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)


def visible_keys(mask, segments, window=None, prefix=None):
    """Bool[B, T, T]: the keys that each query sees."""
    length = segments.shape[1]
    distance = (jnp.arange(length)[:, None] - jnp.arange(length)[None, :])[None]
    seen = {"causal": distance >= 0, "bidirectional": jnp.ones_like(distance, bool)}.get(mask)
    if mask == "prefix":
        seen = (distance >= 0) | (jnp.arange(length)[None, None, :] < prefix[:, None, None])
    if window is not None:
        seen &= jnp.abs(distance) < window
    return seen & (segments[:, :, None] == segments[:, None, :])


def experts_reference(bank, x, routing):
    """Makes every expert of a bank, applies each to every token, and sums what the chosen ones say."""
    kernels = jax.tree.map(lambda *each: jnp.stack(each), *(bank.kernels(i) for i in range(bank.num_experts)))
    kernels = jax.tree.map(lambda kernel: kernel.astype(x.dtype), kernels)
    outputs = jax.vmap(lambda own, biases: ffn(x, own, biases, bank.expert.activation))(kernels, bank.stacked_biases())
    member = jax.nn.one_hot(routing.experts, bank.num_experts, dtype=jnp.float32) * routing.weights[..., None]
    return jnp.einsum("etd,tke->td", outputs, member)
