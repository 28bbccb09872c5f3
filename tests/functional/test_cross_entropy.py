"""The loss in chunks is that of all logits at once, forward and backward, whatever the chunk, the head and the mesh."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.distributed.sharding import make_mesh
from moe_jax.functional import head_chunks
from moe_jax.functional.cross_entropy import token_cross_entropies, weighted_cross_entropy
from moe_jax.functional.head_chunks import HeadOptions, LossAxes, chunk_size, finish_logits, smaller_sizes
from tests.support.jaxprs import equations
from tests.support.losses import token_losses
from tests.support.numerics import normal
from tests.support.tiers import one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")


def at_once(options, x, kernel, bias, targets):
    products = jnp.matmul(x, (kernel.T if options.transposed else kernel).astype(x.dtype))
    return token_losses(finish_logits(products.astype(jnp.float32), bias, options.scale, options.soft_cap), targets)


def operands(shape, options, *, bias=True, seed=0):
    batch, length, width, vocabulary = shape
    kernel = normal(seed, *((vocabulary, width) if options.transposed else (width, vocabulary)))
    rng = np.random.default_rng(seed)
    targets = jnp.asarray(rng.integers(0, vocabulary, (batch, length)), jnp.int32)
    weights = jnp.asarray(rng.random((batch, length)) * (rng.random((batch, length)) < 0.7), jnp.float32)
    x = normal(seed + 1, batch, length, width)
    return x, kernel, normal(seed + 2, vocabulary) if bias else None, targets, weights


@partial(jax.jit, static_argnames=("options", "form"))
def value_and_gradients(x, kernel, bias, targets, weights, *, options, form):
    def value(x, kernel, bias, weights):
        if form == "weighted":
            half = weights * jnp.float32(0.5)
            return weighted_cross_entropy(options, x, kernel, bias, targets, half) * jnp.float32(2)
        of_tokens = {"tokens": token_cross_entropies, "at once": at_once}[form]
        return jnp.sum(of_tokens(options, x, kernel, bias, targets) * weights)

    return jax.value_and_grad(value, argnums=(0, 1, 2, 3))(x, kernel, bias, weights)


def assert_alike(got, expected, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(np.max(np.abs(b))))


@pytest.mark.parametrize(
    ("shape", "chunk", "bias", "options"),
    [
        ((2, 7, 6, 11), 14, False, HeadOptions()),
        ((2, 7, 6, 11), 4, True, HeadOptions(scale=0.3, soft_cap=2.0)),
        ((3, 5, 4, 9), 2, True, HeadOptions(transposed=True)),
        ((1, 8, 4, 9), 4, False, HeadOptions(transposed=True, soft_cap=1.5)),
        ((1, 3, 4, 9), 1, True, HeadOptions(scale=2.0)),
    ],
)
def test_values_and_gradients_of_chunks(shape, chunk, bias, options):
    options = options._replace(logit_bytes=chunk * 4 * shape[3])

    @settings(max_examples=5)
    @given(seed=st.integers(0, 999))
    def check(seed):
        given = operands(shape, options, bias=bias, seed=seed)
        expected = value_and_gradients(*given, options=options, form="at once")
        for form in ("tokens", "weighted"):
            assert_alike(value_and_gradients(*given, options=options, form=form), expected)

    check()


def test_the_losses_do_not_depend_on_the_chunk():
    options = HeadOptions()
    x, kernel, _, targets, _ = operands((2, 24, 8, 31), options)
    found = [
        np.asarray(token_cross_entropies(options._replace(logit_bytes=chunk * 4 * 31), x, kernel, None, targets))
        for chunk in (48, 16, 5, 1)
    ]
    for one in found[1:]:
        np.testing.assert_allclose(one, found[0], rtol=1e-6)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_bfloat16_activations_meet_float32_sums(soft_cap):
    """Logits and the gradient of the kernel are as exact as products of rounded operands can be."""
    options = HeadOptions(soft_cap=soft_cap, logit_bytes=4 * 4 * 17)
    x, kernel, bias, targets, weights = operands((2, 32, 16, 17), options)
    rounded, coarse = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16).astype(jnp.float32)
    got = value_and_gradients(rounded, kernel, bias, targets, weights, options=options, form="weighted")
    exact = value_and_gradients(
        rounded.astype(jnp.float32), coarse, bias, targets, weights, options=options, form="at once"
    )
    np.testing.assert_allclose(got[0], exact[0], rtol=1e-6)
    assert [leaf.dtype for leaf in got[1]] == [jnp.bfloat16, *[jnp.float32] * 3]
    for a, b in zip(got[1], exact[1], strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=2.0**-7, atol=2.0**-8 * float(jnp.max(jnp.abs(b))))


MESHES = [
    ({"data": 2, "fsdp": 2, "tensor": 2}, LossAxes(("data", "fsdp", "expert"), None, ("fsdp",), "tensor")),
    ({"fsdp": 2, "expert": 4}, LossAxes(("data", "fsdp", "expert"))),
    ({"fsdp": 2, "tensor": 4}, LossAxes((), vocabulary="tensor")),
    ({"expert": 2, "fsdp": 2, "sequence": 2}, LossAxes(("data", "fsdp", "expert"), "sequence", ("fsdp", "sequence"))),
]


@one_in(3)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("sizes", "axes"), MESHES)
def test_values_and_gradients_over_a_mesh(sizes, axes, transposed):
    options = HeadOptions(scale=0.5, soft_cap=4.0, transposed=transposed, logit_bytes=3 * 4 * 24)
    given = operands((8, 6, 8, 24), options)
    expected = value_and_gradients(*given, options=options, form="at once")
    mesh = make_mesh(sizes)
    kernel = P("tensor", "fsdp") if transposed else P("fsdp", "tensor")
    specs = (P(("data", "fsdp", "expert")), kernel, P("tensor"), P(("data", "fsdp", "expert")), P())
    placed = [jax.device_put(one, NamedSharding(mesh, spec)) for one, spec in zip(given, specs, strict=True)]
    with jax.set_mesh(mesh):
        for form in ("tokens", "weighted"):
            assert_alike(value_and_gradients(*placed, options=options._replace(axes=axes), form=form), expected)


@pytest.mark.parametrize("chunk", [48, 5])
@pytest.mark.parametrize("on_a_mesh", [False, True])
def test_tokens_that_are_not_scored_are_left_out(monkeypatch, chunk, on_a_mesh):
    """A quarter, a half or all tokens are computed, whichever is enough; on a mesh each device decides for itself."""
    monkeypatch.setattr(head_chunks, "LEAST_PRODUCT", 0)
    axes = LossAxes(("data", "fsdp", "expert")) if on_a_mesh else None
    options = HeadOptions(scale=0.5, logit_bytes=chunk * 4 * 17)
    x, kernel, bias, targets, weights = operands((8, 6, 8, 17), options)

    @jax.jit
    def gradients(weights, x, kernel, bias):
        loss = partial(weighted_cross_entropy, options._replace(axes=axes))
        return jax.value_and_grad(lambda *given: loss(*given, targets, weights), argnums=(0, 1, 2))(x, kernel, bias)

    with jax.set_mesh(make_mesh({"data": 2, "fsdp": 4})) if on_a_mesh else contextlib.nullcontext():
        for scored in (0, 1, 12, 13, 24, 25, 48):
            chosen = np.random.default_rng(scored).permutation(48) < scored
            some = jnp.where(jnp.asarray(chosen.reshape(8, 6)), weights + jnp.float32(0.1), jnp.float32(0))
            expected = value_and_gradients(x, kernel, bias, targets, some, options=options, form="at once")
            assert_alike(gradients(some, x, kernel, bias), (expected[0], expected[1][:3]))
        made = equations(jax.make_jaxpr(gradients)(weights, x, kernel, bias))
    assert any(one.primitive.name == "cond" for one in made)


def test_where_leaving_tokens_out_does_not_pay_all_are_computed():
    assert smaller_sizes(HeadOptions(), 344, 576, 49_152) == [86, 172]
    assert smaller_sizes(HeadOptions(), 64, 64, 512) == []
    assert smaller_sizes(HeadOptions(axes=LossAxes(("data",), vocabulary="tensor")), 344, 576, 49_152) == []


def test_nothing_is_made_for_a_frozen_head():
    options = HeadOptions(logit_bytes=4 * 4 * 11)
    x, kernel, bias, targets, weights = operands((2, 8, 6, 11), options)

    def shapes(wanted):
        loss = jax.grad(partial(weighted_cross_entropy, options), argnums=wanted)
        program = jax.make_jaxpr(loss)(x, kernel, bias, targets, weights)
        return [v.aval.shape for equation in equations(program) for v in equation.outvars]

    assert (6, 11) in shapes((0, 1)) and (6, 11) not in shapes(0)
    assert (16, 6) in shapes((0, 1)) and shapes(1).count((2, 8, 6)) == 0


def test_chunks_are_as_large_as_memory_allows():
    assert chunk_size(4 * 512, 512) == 4 * 512  # a small model: all at once
    assert chunk_size(8 * 4096, 151_936) == 1024
    assert chunk_size(8 * 4096, 151_936, logit_bytes=1) == 1
