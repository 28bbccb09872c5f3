"""Attention against a plain softmax in float64, with every mask, forward and gradient."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.distributed.sharding import make_mesh
from moe_jax.experts.devices import attention_placement
from moe_jax.functional import attention as module
from moe_jax.functional import attention_chunks as chunks
from moe_jax.functional.attention import Placement, Visibility, attention
from moe_jax.functional.position_embeddings import RelativeBiasConfig, bias_by_distance
from tests.support.jaxprs import equations
from tests.support.numerics import normal
from tests.support.references import attention_reference, visible_keys
from tests.support.tiers import examples, long, one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

# Where the platform is not known, programs for all are traced, which takes three times as long; see the last test.
CPU = Placement("cpu")


@partial(jax.jit, static_argnames=("form", "mask", "window", "scale", "soft_cap", "chunk"))
def values_and_gradients(q, k, v, weight, segments, prefix, *, form, mask, window, scale, soft_cap, chunk):
    positions = jnp.broadcast_to(jnp.arange(q.shape[1])[None], q.shape[:2])

    def value(q, k, v):
        if form == "reference":
            seen = visible_keys(mask, segments, window, prefix)
            return jnp.sum(attention_reference(q if scale is None else 2 * scale * q, k, v, seen, soft_cap) * weight)
        visible = Visibility(positions, positions, segments, segments, prefix if mask == "prefix" else None)
        options = dict(mask=mask, window=window, scale=scale, soft_cap=soft_cap, placement=CPU)
        return jnp.sum(attention(q, k, v, visible, aligned=form == "aligned", **options) * weight)

    return jax.value_and_grad(value, argnums=(0, 1, 2))(q, k, v)


# The shapes are few, so that programs are compiled once; documents, which are data, are drawn freely. Chunks of two
# make bands of several chunks, which are looped over.
@one_in(5)
@pytest.mark.parametrize(
    ("length", "heads", "mask", "window", "scale", "soft_cap", "chunk"),
    [
        (1, (1, 1), "causal", None, None, None, 8),
        (21, (4, 2), "causal", None, 0.3, None, 8),
        (21, (2, 1), "causal", None, None, 0.7, 2),
        (21, (3, 1), "causal", 5, None, None, 8),
        (39, (2, 1), "causal", 5, 1.5, 2.0, 2),
        (16, (2, 2), "causal", 9, None, None, 8),
        (21, (2, 1), "bidirectional", None, None, None, 8),
        (39, (2, 2), "bidirectional", 4, None, None, 2),
        (21, (2, 1), "prefix", None, None, None, 8),
    ],
)
def test_masks_values_and_gradients(length, heads, mask, window, scale, soft_cap, chunk, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", chunk)

    @settings(max_examples=examples(8), deadline=None)
    @given(boundary=st.floats(0, 1), seed=st.integers(0, 999))
    def check(boundary, seed):
        rng = np.random.default_rng(seed)
        draw = lambda heads: jnp.asarray(rng.standard_normal((2, length, heads, 4)), jnp.float32)  # noqa: E731
        q, k, v, weight = draw(heads[0]), draw(heads[1]), draw(heads[1]), draw(heads[0])
        segments = jnp.asarray(np.cumsum(rng.random((2, length)) < boundary, axis=1), jnp.int32)
        prefix = jnp.asarray(rng.integers(0, length + 1, 2), jnp.int32)
        given = dict(mask=mask, window=window, scale=scale, soft_cap=soft_cap, chunk=chunk)
        expected = values_and_gradients(q, k, v, weight, segments, prefix, form="reference", **given)
        for form in ("aligned", "unaligned"):
            got = values_and_gradients(q, k, v, weight, segments, prefix, form=form, **given)
            chex.assert_trees_all_close(got, expected, rtol=2e-5, atol=2e-5)

    check()


@one_in(3)
@pytest.mark.parametrize(("mask", "aligned"), [("causal", True), ("bidirectional", True), ("causal", False)])
def test_relative_biases_and_their_gradients(mask, aligned, monkeypatch):
    """Chunk by chunk, with several chunks in a band, against all biases in one array of queries and keys."""
    monkeypatch.setattr(chunks, "CHUNK", 2)
    shape = {"q": (2, 13, 4, 8), "k": (2, 13, 2, 8), "v": (2, 13, 2, 8), "table": (7, 4), "weight": (2, 13, 4, 8)}
    given = {name: normal(i, *size) for i, (name, size) in enumerate(shape.items())}
    positions = jnp.broadcast_to(jnp.arange(13)[None], (2, 13))
    config = RelativeBiasConfig(buckets=7, max_distance=5)

    def of_chunks(given):
        bias = bias_by_distance(given["table"], config, mask)
        visible = Visibility(positions, positions)
        q, k, v, weight = (given[name] for name in ("q", "k", "v", "weight"))
        options = dict(mask=mask, scale=1.0, bias=bias, aligned=aligned, placement=CPU)
        return jnp.sum(attention(q, k, v, visible, **options) * weight)

    def at_once(given):
        q, k, v, table, weight = (given[name] for name in shape)
        distance = np.arange(13)[None, :] - np.arange(13)[:, None]
        buckets = config.bucket_of_distance(mask)[np.clip(distance, -5, 5) + 5]
        k, v = (jnp.repeat(a, 2, axis=2) for a in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) + jnp.moveaxis(table[buckets], 2, 0)[None]
        scores = jnp.where(distance[None, None] > 0, -jnp.inf, scores) if mask == "causal" else scores
        return jnp.sum(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v) * weight)

    (value, got), (expected, gradient) = (jax.jit(jax.value_and_grad(f))(given) for f in (of_chunks, at_once))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name in given:
        np.testing.assert_allclose(got[name], gradient[name], rtol=1e-4, atol=1e-5, err_msg=name)


def causal(x, length, bias=None):
    positions = jnp.arange(length)[None]
    return attention(x, x, x, Visibility(positions, positions), bias=bias, aligned=True, placement=CPU)


@one_in(2)
@pytest.mark.parametrize("biased", [False, True])
@long
def test_backward_keeps_no_scores_but_those_of_a_chunk(biased):
    def temporaries(length):
        bias = jnp.ones((2, 257)) if biased else None
        gradient = jax.jit(jax.grad(lambda x, bias: jnp.sum(causal(x, length, bias)), argnums=(0, 1) if biased else 0))
        return gradient.lower(jnp.ones((1, length, 2, 8)), bias).compile().memory_analysis().temp_size_in_bytes

    # The square would make it four times as much, and the scores of one head take twice the bound below.
    assert temporaries(4096) < 2.5 * temporaries(2048) and temporaries(4096) < 4096 * 4096


@one_in(3, first=1)
@pytest.mark.parametrize("options", [{}, {"window": 1024}, {"mask": "bidirectional"}])
def test_the_program_does_not_grow_with_the_length(options):
    def size(length):
        positions = jnp.arange(length)[None]
        visible = Visibility(positions, positions)
        x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        loss = lambda x: jnp.sum(attention(x, x, x, visible, aligned=True, placement=CPU, **options))  # noqa: E731
        return len(str(jax.make_jaxpr(jax.grad(loss))(x)).splitlines())

    assert size(8192) <= 1.1 * size(2048)


def test_bands_need_little_more_arithmetic_than_the_mask():
    for length, window, bound in ((32768, None, 1.13), (32768, 1024, 1.15), (1024, None, 1.13)):
        bands = chunks._bands(length, length, chunks.AttentionOptions("causal", window, 1.0, None, aligned=True))
        assert sum(band.size * band.count for band in bands) == length
        done = sum(band.count * band.size * band.span for band in bands)
        seen = sum(min(t + 1, window or length) for t in range(length))
        assert done <= bound * seen


def test_scaling_does_not_round_the_queries():
    """In bfloat16 the scores are those of the given queries: a width of 8 scales by a number that is no power of 2."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 8, 1, 8)) * 8, jnp.bfloat16) for _ in range(2))
    positions = jnp.arange(8)[None]
    values = jnp.eye(8, dtype=jnp.bfloat16)[None, :, None]
    shares = attention(q, k, values, Visibility(positions, positions), aligned=True)
    exact = np.asarray(q, np.float64)[0, :, 0] @ np.asarray(k, np.float64)[0, :, 0].T / np.sqrt(8)
    exact = np.where(np.tri(8, dtype=bool), np.exp(exact - exact.max(axis=1, keepdims=True)), 0.0)
    exact /= exact.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.asarray(shares, np.float64)[0, :, 0], exact, rtol=2**-8, atol=1e-6)


def test_sums_over_chunks_are_float32(monkeypatch):
    """Every query adds the same to the gradient of the first value; in bfloat16 the sum would stop growing at 256."""
    monkeypatch.setattr(chunks, "CHUNK", 1)
    length = 1024
    positions = jnp.arange(length)[None]
    zeros = jnp.zeros((1, length, 1, 8), jnp.bfloat16)
    visible = Visibility(positions, positions)

    def total(v):
        y = attention(zeros, zeros, v, visible, mask="bidirectional", aligned=False)
        return jnp.sum(y.astype(jnp.float32))

    gradient = jax.jit(jax.grad(total))(zeros)
    np.testing.assert_allclose(np.asarray(gradient, np.float32), 1.0, rtol=2**-8)


def test_accelerator_form_equals_cpu_form():
    q = normal(0, 2, 3, 2, 40, 8)
    k, v = (normal(i, 2, 3, 40, 8) for i in (1, 2))
    positions = jnp.broadcast_to(jnp.arange(40)[None], (2, 40))
    options = chunks.AttentionOptions("causal", None, 0.5, None, aligned=True)
    one_head = partial(chunks._one_key_head, chunks._bands(40, 40, options), options)
    visible = Visibility(positions, positions)
    bias, sinks = normal(3, 3, 2, 9), normal(4, 3, 2)
    a, b = (
        jax.jit(lambda *given, form=form: form(one_head, *given[:3], visible, *given[3:]))(q, k, v, bias, sinks)
        for form in (chunks._loop_over_heads, chunks._all_heads_at_once)
    )
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def kernels_of(placement, length=300, dtype="bfloat16", packed=True, width=64, value_width=None, **options):
    """Names of the kernels that a program calls."""
    x = jax.ShapeDtypeStruct((2, length, 4, width), dtype)
    positions = jnp.broadcast_to(jnp.arange(length)[None], (2, length))
    documents = (jnp.zeros((2, length), jnp.int32),) * 2 if packed else ()
    prefix = {"prefix": jnp.ones(2, jnp.int32)} if options.get("mask") == "prefix" else {}
    visible = Visibility(positions, positions, *documents, **prefix)
    given = dict(aligned=True, placement=placement) | options
    values = jax.ShapeDtypeStruct((2, length, 4, value_width or width), dtype)
    program = jax.make_jaxpr(lambda x, values: attention(x, x, values, visible, **given))(x, values)
    return [one.params["name"] for one in equations(program) if one.primitive.name == "pallas_call"]


@pytest.mark.parametrize(
    ("platform", "options", "kernel", "reason"),
    [
        (None, {}, None, None),
        ("cpu", {}, None, None),
        ("tpu", {"soft_cap": 30.0, "window": 100}, "splash_mha_fwd_segmented_no_residuals", None),
        ("tpu", {"mask": "bidirectional", "aligned": False}, "splash_mha_fwd_segmented_no_residuals", None),
        ("tpu", {"length": 100}, None, None),
        ("tpu", {"width": 256}, "splash_mha_fwd_segmented_no_residuals", None),
        ("tpu", {"width": 264}, None, "TPU's kernels, which are faster: heads are wider than 256"),
        ("tpu", {"value_width": 264}, None, "TPU's kernels, which are faster: heads are wider than 256"),
        ("tpu", {"mask": "prefix"}, None, "TPU's kernels, which are faster"),
        ("tpu", {"aligned": False}, None, "TPU's kernels, which are faster"),
        ("tpu", {"bias": jnp.zeros((4, 9))}, None, "TPU's kernels, which are faster"),
        ("gpu", {}, "mha_forward", None),
        ("gpu", {"soft_cap": 30.0}, None, "GPU's kernels, which are faster: scores are capped"),
        ("gpu", {"dtype": "float32"}, None, "GPU's kernels, which are faster: activations are float32"),
    ],
)
def test_the_platforms_kernel_or_one_word_why_not(platform, options, kernel, reason, caplog):
    module._say_once.cache_clear()
    for _ in range(2):
        found = kernels_of(None if platform is None else Placement(platform), **options)
        assert found == ([] if kernel is None else [kernel])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (reason is not None) and all(reason in message for message in said)


@one_in(3)
@pytest.mark.parametrize(
    ("sizes", "rows", "heads"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, 4, (4, 2)),
        ({"expert": 2, "tensor": 4}, 4, (8, 2)),  # as many parts as twice the key heads
        ({"fsdp": 2, "tensor": 4}, 3, (6, 3)),  # neither rows nor heads can be divided
        ({"fsdp": 2, "sequence": 2, "tensor": 2}, 4, (8, 2)),  # sequences become heads
        ({"fsdp": 2, "sequence": 4}, 4, (6, 3)),  # heads cannot be divided, queries can
    ],
)
def test_a_kernel_is_called_by_every_device_for_its_rows_and_heads(sizes, rows, heads):
    rng = np.random.default_rng(0)
    q, k, v, weight = (
        jnp.asarray(rng.standard_normal((rows, 12, count, 4)), jnp.float32) for count in (*heads, heads[1], heads[0])
    )
    segments = jnp.asarray(np.cumsum(rng.random((rows, 12)) < 0.3, axis=1), jnp.int32)

    positions = jnp.broadcast_to(jnp.arange(12)[None], (rows, 12))
    visible = Visibility(positions, positions, segments, segments)

    sinks = jnp.asarray(rng.standard_normal(heads[0]), jnp.float32)

    def kernel(q, k, v, visible, bias, sinks):
        return attention(q, k, v, visible, sinks=sinks, aligned=False)

    def results(function):
        value = lambda q, k, v, sinks: jnp.sum(function(q, k, v, visible, None, sinks) * weight)  # noqa: E731
        return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2, 3)))(q, k, v, sinks)

    expected = results(kernel)
    with jax.set_mesh(make_mesh(sizes)):
        placement = attention_placement(rows, 12)
        got = results(module._over_devices(kernel, placement))
    sequence = "sequence" if "sequence" in sizes else None
    axes, parts = ("tensor", *["sequence"] * ("sequence" in sizes)), sizes.get("tensor", 1) * sizes.get("sequence", 1)
    batch = ("data", "fsdp", "expert") if rows == 4 else ()
    assert placement == Placement("cpu", batch, axes, parts, 8, sequence)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_where_the_platform_is_not_known_yet_the_gradient_is_that_of_the_chunks(mask):
    rng = np.random.default_rng(0)
    q, k, v, weight = (jnp.asarray(rng.standard_normal((1, 150, count, 8)), jnp.bfloat16) for count in (2, 1, 1, 2))
    positions = jnp.arange(150)[None]
    segments = jnp.asarray(np.cumsum(rng.random((1, 150)) < 0.05, axis=1), jnp.int32)
    visible = Visibility(positions, positions, segments, segments)

    def results(placement):
        def value(q, k, v):
            y = attention(q, k, v, visible, mask=mask, aligned=True, placement=placement)
            return jnp.sum((y * weight).astype(jnp.float32))

        program = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))
        deferred = [one for one in equations(jax.make_jaxpr(program)(q, k, v)) if one.primitive.name == "deferred"]
        return program(q, k, v), len(deferred)

    (got, kernels), (expected, none) = results(None), results(Placement("cpu"))
    assert (kernels, none) == (4, 0)  # of two platforms, forward and backward
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), got, expected)
