"""The hidden states of low-rank experts, made in one kernel, in interpret mode against plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.functional.gated import Hidden, Projection, _fused_low_rank, low_rank_hidden
from moe_jax.functional.routing.token_choices import NO_EXPERT, Routing
from moe_jax.kernels.hardware import ANY_CORE
from moe_jax.kernels.tpu import low_rank_hidden as kernel
from tests.support.jaxprs import equations
from tests.support.numerics import assert_close
from tests.support.tiers import one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

FEATURES, EXPERTS, RANK, TOP_K = 256, 3, 8, 2
SIZE = EXPERTS * RANK
ONE_ROUNDING = 2.0**-8


def arguments(rng, tokens, dtype=jnp.float32, equal=False):
    """The last token has padding in place of its second expert."""

    def random(*shape):
        return jnp.asarray(rng.standard_normal(shape) * 0.3, dtype)

    def projection():
        inner = random(tokens, SIZE)
        return Projection(random(tokens, FEATURES), jnp.zeros_like(inner) if equal else inner, random(SIZE, FEATURES))

    experts = jnp.asarray([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)], jnp.int32)
    weights = jax.nn.softmax(random(tokens, TOP_K).astype(jnp.float32), axis=-1)
    if not equal:
        experts, weights = experts.at[-1, 1].set(NO_EXPERT), weights.at[-1, 1].set(0)
    return projection(), projection(), random(FEATURES, SIZE), Routing(experts, weights)


@functools.cache
def together(activation):
    def run(gate, up, a, routing):
        return Hidden(*kernel.low_rank_hidden(gate, up, a, routing, EXPERTS, activation, interpret=True))

    return jax.jit(run)


@functools.cache
def apart(activation):
    return jax.jit(lambda gate, up, a, routing: low_rank_hidden(gate, up, a, routing, EXPERTS, activation))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    # Several blocks of tokens and of the hidden layer, and several strips of a block.
    for name, value in {"_TOKEN_BLOCKS": (32,), "_WIDTHS": (128,), "_STRIP": 16}.items():
        monkeypatch.setattr(kernel, name, value)


@one_in(3)
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_clamped"])
@pytest.mark.parametrize("tokens", [1, 77])
def test_is_what_the_products_one_after_the_other_give(tokens, activation):
    @settings(max_examples=3)
    @given(st.integers(0, 99))
    def check(seed):
        given_ = arguments(np.random.default_rng(seed), tokens)
        got, expected = together(activation)(*given_), apart(activation)(*given_)
        assert_close(got.summed, expected.summed)
        assert_close(got.inner, expected.inner)

    check()


def test_is_rounded_once():
    exact = arguments(np.random.default_rng(0), 40, jnp.bfloat16)
    got = together("silu")(*exact)
    gate, up, a = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), exact[:3])
    expected = apart("silu")(gate, up, a, exact[3])
    assert got.summed.dtype == jnp.bfloat16 and got.inner.dtype == jnp.float32
    np.testing.assert_allclose(got.summed.astype(jnp.float32), expected.summed, rtol=ONE_ROUNDING, atol=1e-6)
    # The hidden states are rounded for the product with `a`.
    assert_close(got.inner, expected.inner, 4 * ONE_ROUNDING)


def test_equal_hidden_states_are_their_sum_to_the_last_bit():
    """An upcycled model begins as its dense model, whatever the weights of the choices are (methods.md 2.5)."""
    gate, up, a, (experts, weights) = arguments(np.random.default_rng(1), 40, equal=True)
    weights = jnp.stack([weights[:, 0], jnp.float32(1) - weights[:, 0]], axis=1)
    got = together("silu")(gate, up, a, Routing(experts, weights))
    ones = jnp.tile(jnp.asarray([[1.0, 0.0]], jnp.float32), (40, 1))
    np.testing.assert_array_equal(got.summed, together("silu")(gate, up, a, Routing(experts, ones)).summed)


def test_the_gradient_is_that_of_the_products_one_after_the_other():
    gate, up, a, (experts, weights) = arguments(np.random.default_rng(2), 9)

    def plain(gate, up, a, weights):
        """Expert by expert, by its own factors."""
        summed, inner = jnp.zeros_like(gate.of_base), jnp.zeros_like(gate.inner)
        for e in range(EXPERTS):
            own = slice(e * RANK, (e + 1) * RANK)
            of_gate, of_up = (one.of_base + one.inner[:, own] @ one.b[own] for one in (gate, up))
            share = jnp.sum(jnp.where(experts == e, weights, 0), axis=1)[:, None]
            h = jax.nn.silu(of_gate) * of_up
            summed += share * h
            inner = inner.at[:, own].set(share * (h @ a[:, own]))
        return summed, inner

    def loss(function, *args):
        summed, inner = function(*args)
        return jnp.sum(jnp.sin(summed)) + jnp.sum(jnp.cos(inner))

    def ours(gate, up, a, weights):
        return apart("silu")(gate, up, a, Routing(experts, weights))

    def both(function):
        gradients = jax.grad(lambda *args: loss(function, *args), argnums=(0, 1, 2, 3))
        return jax.jit(lambda *args: (tuple(function(*args)), gradients(*args)))(gate, up, a, weights)

    (ours_said, got), (plain_said, expected) = both(ours), both(plain)
    jax.tree.map(assert_close, ours_said, plain_said)
    # Padding has weight zero, which nothing learns.
    real = experts != NO_EXPERT
    got, expected = ((*of[:3], jnp.where(real, of[3], 0)) for of in (got, expected))
    jax.tree.map(assert_close, got, expected)


@pytest.mark.parametrize(
    ("features", "size", "fits"),
    [(11008, 128, True), (14336, 128, True), (1024, 1024, True), (768, 2048, True), (100, 128, False)],
)
def test_which_shapes_have_blocks(features, size, fits, monkeypatch):
    monkeypatch.undo()
    assert kernel.fits(features, size, jnp.bfloat16, ANY_CORE) is fits


@pytest.mark.parametrize(
    ("tokens", "dtype", "rows"),
    [(1, "bfloat16", 16), (40, "bfloat16", 48), (40, "float32", 40), (300, "bfloat16", 512), (3000, "bfloat16", 1024)],
)
def test_few_tokens_are_one_small_block_and_many_are_whole_strips(tokens, dtype, rows, monkeypatch):
    """A decoder's step has few tokens: they are filled up to a tile of their dtype and not to a strip."""
    monkeypatch.undo()
    given_ = jax.eval_shape(lambda: arguments(np.random.default_rng(0), tokens, dtype))
    program = jax.make_jaxpr(functools.partial(kernel.low_rank_hidden, num_experts=EXPERTS, activation="silu"))(*given_)
    (call,) = (one for one in equations(program) if one.primitive.name == "pallas_call")
    mapping = call.params["grid_mapping"]
    hidden_block, inner_block = ([side.block_size for side in of.block_shape] for of in mapping.block_mappings[-2:])
    assert hidden_block == [rows, FEATURES] and inner_block == [rows, SIZE]
    assert mapping.grid == (-(-tokens // rows), 1)


def test_what_does_not_fit_is_made_apart(monkeypatch):
    given_ = arguments(np.random.default_rng(3), 9)
    monkeypatch.setattr(kernel, "fits", lambda *sizes, **options: False)
    monkeypatch.setattr(kernel, "low_rank_hidden", None)
    got = jax.jit(lambda *args: _fused_low_rank(*args, num_experts=EXPERTS, activation="silu"))(*given_)
    assert_close(got, apart("silu")(*given_))


def test_what_fits_is_made_by_the_kernel_if_both_projections_are_of_one_size(monkeypatch):
    gate, up, *rest = arguments(np.random.default_rng(3), 9)
    monkeypatch.setattr(kernel, "fits", lambda *sizes, **options: True)
    made = []
    monkeypatch.setattr(kernel, "low_rank_hidden", lambda *args, **options: made.append(args) or args[:2])
    options = {"num_experts": EXPERTS, "activation": "silu"}
    assert _fused_low_rank(gate, up, *rest, **options).summed is gate and len(made) == 1
    smaller = gate._replace(b=gate.b[:EXPERTS], inner=gate.inner[..., :EXPERTS])
    monkeypatch.setattr(kernel, "low_rank_hidden", None)
    assert isinstance(_fused_low_rank(smaller, up, *rest, **options), Hidden)
