"""Attention by cuDNN and by Triton, forward and gradients, against plain attention in float32."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.distributed.sharding import make_mesh
from moe_jax.experts.devices import attention_placement
from moe_jax.functional.attention import Visibility, attention
from tests.on_gpu.measured import ROUNDING, error, needs_gpu, normal
from tests.support.references import attention_reference, visible_keys

pytestmark = needs_gpu

LLAMA, BERT, TINY = (32, 8, 128), (12, 12, 64), (8, 4, 8)
ROWS = 2


@pytest.mark.parametrize(
    ("heads", "length", "options"),
    [
        (LLAMA, 1024, {}),
        (LLAMA, 1024, {"packed": True}),
        (LLAMA, 1024, {"window": 256}),
        (LLAMA, 1000, {"packed": True, "mesh": False}),
        (LLAMA, 777, {"mesh": False}),
        (BERT, 1000, {"mask": "bidirectional"}),
        (BERT, 1000, {"mask": "bidirectional", "packed": True}),
        (TINY, 512, {}),
        (TINY, 512, {"packed": True}),
        (TINY, 200, {"packed": True, "mesh": False}),
        (LLAMA, 100, {}),
        (LLAMA, 1024, {"dtype": "float16"}),
        (LLAMA, 1024, {"dtype": "float16", "packed": True}),
    ],
    ids=str,
)
def test_attention(heads, length, options):
    dtype = options.get("dtype", "bfloat16")
    query_heads, key_heads, width = heads
    mask, window = options.get("mask", "causal"), options.get("window")
    rng = np.random.default_rng(0)
    q, k, v, weight = (
        normal(seed, (ROWS, length, count, width), dtype)
        for seed, count in enumerate((query_heads, key_heads, key_heads, query_heads))
    )
    segments = jnp.zeros((ROWS, length), jnp.int32)
    if options.get("packed"):
        segments = jnp.asarray(np.cumsum(rng.random((ROWS, length)) < 0.01, axis=1), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (ROWS, length))

    def ours(q, k, v):
        visible = Visibility(positions, positions, *(segments, segments) if options.get("packed") else ())
        placement = attention_placement(ROWS, length)
        y = attention(q, k, v, visible, mask=mask, window=window, aligned=True, placement=placement)
        return jnp.sum(y.astype(jnp.float32) * weight.astype(jnp.float32)), y

    def exact(q, k, v):
        y = attention_reference(q, k, v, visible_keys(mask, segments, window))
        return jnp.sum(y * weight.astype(jnp.float32)), y

    with jax.default_matmul_precision("highest"):
        given = tuple(a.astype(jnp.float32) for a in (q, k, v))
        expected, expected_y = jax.jit(jax.grad(exact, argnums=(0, 1, 2), has_aux=True))(*given)
    mesh = contextlib.nullcontext() if options.get("mesh") is False else jax.set_mesh(make_mesh({}, jax.devices()[:1]))
    with mesh:
        got, y = jax.jit(jax.grad(ours, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    # Of the output and of each gradient; weights of attention are rounded before they are multiplied.
    errors = [error(a, b) for a, b in zip((y, *got), (expected_y, *expected), strict=True)]
    assert max(errors) <= 3 * ROUNDING[dtype], errors
