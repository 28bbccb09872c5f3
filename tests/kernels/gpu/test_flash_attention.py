"""Attention of packed documents on GPUs, in interpret mode, is the reference; and what no kernel computes is known."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.functional.attention import Visibility, attention
from moe_jax.kernels.gpu.flash_attention import flash_attention, refusal
from tests.support.environment import INTERPRET

pytestmark = pytest.mark.usefixtures("strict_numerics")


@partial(jax.jit, static_argnames=("form", "mask"))
def output_and_gradients(q, k, v, weight, segments, *, form, mask):
    def value(q, k, v):
        if form == "kernel":
            nearest = 0 if mask == "causal" else None
            options = dict(nearest=nearest, farthest=None, scale=0.3, interpret=INTERPRET)
            y = flash_attention(q, k, v, segments, segments, **options)
        else:
            positions = jnp.broadcast_to(jnp.arange(q.shape[1])[None], q.shape[:2])
            visible = Visibility(positions, positions, segments, segments)
            y = attention(q, k, v, visible, mask=mask, scale=0.3, aligned=True)
        return jnp.sum(y * weight), y

    (_, y), gradients = jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return y, *gradients


@pytest.mark.parametrize(
    ("length", "heads", "width", "mask"), [(200, (4, 2), 16, "causal"), (256, (2, 2), 24, "bidirectional")]
)
def test_packed_documents(length, heads, width, mask):
    rng = np.random.default_rng(0)
    shapes = [(2, length, count, width) for count in (*heads, heads[1], heads[0])]
    q, k, v, weight = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    segments = jnp.asarray(np.cumsum(rng.random((2, length)) < 0.03, axis=1), jnp.int32)
    got, expected = (output_and_gradients(q, k, v, weight, segments, form=form, mask=mask) for form in ("kernel", ""))
    # Relative to the largest value: sums of terms that cancel have the error of the terms.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), got, expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"packed": True}, None),
        ({"nearest": None}, None),
        ({"farthest": 100}, None),
        ({"packed": True, "farthest": 255}, None),
        ({"packed": True, "farthest": 100}, "documents or padding, and a window"),
        ({"nearest": -100, "farthest": 100}, "window reaches to both sides"),
        ({"soft_cap": 30.0}, "capped"),
        ({"capability": (7, 5)}, "older than Ampere"),
        ({"dtype": "float32"}, "float32, not bfloat16"),
        ({"width": 192}, "at most 128"),
        ({"width": 20}, "multiple of 8"),
        ({"keys": 300}, None),
        ({"packed": True, "keys": 300}, "another length"),
    ],
)
def test_what_no_kernel_computes_is_said(changes, words):
    options = dict(packed=False, nearest=0, farthest=None, soft_cap=None, capability=None) | changes
    dtype, width, keys = options.pop("dtype", "bfloat16"), options.pop("width", 64), options.pop("keys", 256)
    q = jax.ShapeDtypeStruct((2, 256, 4, width), dtype)
    k = jax.ShapeDtypeStruct((2, keys, 2, width), dtype)
    found = refusal(q, k, k, **options)
    assert found is None if words is None else words in str(found)
