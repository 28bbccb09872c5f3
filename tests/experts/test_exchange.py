"""Rows that travel to their experts and back: against one FFN per expert, and against plans made row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh, state_shardings
from moe_jax.experts import BankConfig, FFNConfig, make_bank, set_exchange
from moe_jax.experts.exchange import AXIS, Buffer, Exchange, _send_fwd, make_plan, rounds_needed
from moe_jax.functional.dense import ffn
from moe_jax.functional.routing.token_choices import NO_EXPERT, Routing
from tests.support.numerics import assert_close, randomised
from tests.support.tiers import one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

D_MODEL, HIDDEN, TOP_K, TOKENS = 8, 16, 2, 32
KINDS = {
    "full": BankConfig(),
    "low-rank": BankConfig(kind="low-rank", rank=3),
    "quantized-2": BankConfig(kind="quantized", bits=2, group_size=8),
}


class Layer(nnx.Module):
    """A bank with the paths that it has in a model."""

    def __init__(self, kind, experts):
        expert = FFNConfig(dim=HIDDEN, gated=False, activation="gelu", bias=True)
        self.experts = make_bank(KINDS[kind], expert, experts, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32)
        self.experts.strategy = "synthesised"


@functools.cache
def layer(kind, experts):
    return randomised(lambda: Layer(kind, experts))


def loss_and_output(graphdef, apply):
    def value(params, x, weights, rest, experts, target):
        y = apply(nnx.merge(graphdef, params, rest).experts, x, Routing(experts, weights))
        return jnp.sum(y * target), y

    return jax.jit(jax.grad(value, argnums=(0, 1, 2), has_aux=True))


@functools.cache
def reference(kind, experts):
    def apply(bank, x, routing):
        kernels = jax.tree.map(lambda *each: jnp.stack(each), *(bank.kernels(i) for i in range(experts)))
        ffns = jax.vmap(lambda own, biases: ffn(x, own, biases, bank.expert.activation))
        member = jax.nn.one_hot(routing.experts, experts, dtype=jnp.float32) * routing.weights[..., None]
        return jnp.einsum("etd,tke->td", ffns(kernels, bank.stacked_biases()), member)

    return loss_and_output(layer(kind, experts)[0], apply)


@functools.cache
def over_mesh(kind, experts, axes, exchange):
    graphdef, params, rest = layer(kind, experts)
    mesh = make_mesh(dict(axes))

    def put(state):
        return jax.device_put(state, state_shardings(state, mesh))

    def apply(bank, x, routing):
        set_exchange(bank, exchange)
        return bank(x, routing)

    program = loss_and_output(graphdef, apply)
    params, rest = put(params), put(rest)

    def run(x, weights, experts, target):
        with jax.set_mesh(mesh):
            split = NamedSharding(mesh, P(("data", "fsdp", "expert")))
            x, weights, experts, target = (jax.device_put(a, split) for a in (x, weights, experts, target))
            return program(params, x, weights, rest, experts, target)

    return run


def draw(seed, tokens, experts, skew):
    """Random tokens; with `skew` most of them choose the first two experts, and some choose none."""
    rng = np.random.default_rng(seed)
    shares = np.full(experts, 1.0)
    if skew:
        shares[:2] += 40 * experts
    chosen = [rng.choice(experts, TOP_K, replace=False, p=shares / shares.sum()) for _ in range(tokens)]
    chosen = np.where(rng.random((tokens, TOP_K)) < 0.1 * skew, NO_EXPERT, np.array(chosen))
    weights = np.where(chosen == NO_EXPERT, 0, rng.random((tokens, TOP_K)))
    arrays = rng.standard_normal((tokens, D_MODEL)), weights, rng.standard_normal((tokens, D_MODEL))
    x, weights, target = (jnp.asarray(a, jnp.float32) for a in arrays)
    return x, weights, jnp.asarray(chosen, jnp.int32), target


@one_in(18, first=11)
@pytest.mark.parametrize(
    ("kind", "experts", "axes", "exchange"),
    [
        ("full", 8, {"expert": 8}, "all-to-all"),
        ("full", 8, {"expert": 4, "tensor": 2}, "all-to-all:0.4"),
        ("full", 6, {"data": 2, "expert": 4}, "all-to-all:1"),
        ("full", 5, {"expert": 4, "fsdp": 2}, "all-gather"),
        ("full", 8, {"expert": 4, "tensor": 2}, "all-gather:0.4"),
        ("quantized-2", 8, {"fsdp": 2, "expert": 4}, "all-gather:0.3"),
        ("quantized-2", 8, {"expert": 4, "tensor": 2}, "all-to-all:0.4"),
        ("low-rank", 4, {"fsdp": 2, "expert": 2, "tensor": 2}, "all-to-all"),
        ("full", 3, {"expert": 8}, "all-to-all:0.01"),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [TOKENS, 8])
def test_it_gives_what_every_expert_alone_gives(kind, experts, axes, exchange, tokens):
    @settings(max_examples=6, deadline=None)
    @given(st.booleans(), st.integers(0, 999))
    def check(skew, seed):
        x, weights, chosen, target = draw(seed, tokens, experts, skew)
        got = over_mesh(kind, experts, tuple(axes.items()), exchange)(x, weights, chosen, target)
        _, params, rest = layer(kind, experts)
        assert_close(got, reference(kind, experts)(params, x, weights, rest, chosen, target))

    check()


@pytest.mark.parametrize("ragged", [True, False])
def test_every_row_travels_once_and_finds_its_expert(ragged):
    devices, local = 4, 3
    plans = jax.jit(
        jax.vmap(make_plan, in_axes=(None, None, None), out_axes=0, axis_name=AXIS, axis_size=devices),
        static_argnums=1,
    )

    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 2.0]))
    def check(seed, capacity):
        rng = np.random.default_rng(seed)
        counts = rng.integers(0, 6, (devices, devices, local)) * (rng.random((devices, devices, 1)) < 0.6)
        buffer = Buffer.of(12, devices, capacity, ragged=ragged)
        assert buffer.rows >= 12 * capacity
        # Which expert every sorted row of a sender is for: device and local expert.
        rows = [[(r, e) for r in range(devices) for e in range(local) for _ in range(counts[s, r, e])]
                for s in range(devices)]  # fmt: skip
        travelled = [[0] * len(of_sender) for of_sender in rows]
        needed = int(rounds_needed(jnp.asarray(counts, jnp.int32), buffer))
        assert needed <= -(-max(int(counts.sum(axis=(0, 2)).max()), 1) // (buffer.rows // devices))
        for number in range(needed):
            plan = jax.tree.map(np.asarray, plans(jnp.asarray(counts, jnp.int32), buffer, jnp.int32(number)))
            for receiver in range(devices):
                found = np.full(buffer.rows, local)
                for sender in range(devices):
                    first, size = plan.first[sender, receiver], plan.sent[sender, receiver]
                    place = plan.there[sender, receiver]
                    assert plan.received[receiver, sender] == size
                    assert size == 0 or plan.place[receiver, sender] == place
                    assert plan.origin[receiver, sender] == first
                    for i in range(size):
                        device, expert = rows[sender][first + i]
                        assert device == receiver and found[place + i] == local
                        found[place + i] = expert
                        travelled[sender][first + i] += 1
                np.testing.assert_array_equal(plan.experts[receiver], found)
        assert all(times == 1 for of_sender in travelled for times in of_sender)

    check()


def test_fewer_bytes_are_chosen():
    assert Exchange().chosen(2, 2) == "all-gather" and Exchange().chosen(8, 2) == "all-to-all"
    assert Exchange("all-gather").chosen(64, 2) == "all-gather"
    assert Exchange.parse("all-to-all:1.5", "x") == Exchange("all-to-all", 1.5)
    assert Exchange.parse("all-gather:3", "x") == Exchange("all-gather", 3.0)


@pytest.mark.parametrize("text", ["alltoall", "auto:2", "all-to-all:0", "all-to-all:x", "all-to-all:inf"])
def test_what_is_no_exchange_is_named(text, monkeypatch):
    monkeypatch.setenv("MOE_JAX_EXCHANGE", text)
    with pytest.raises(InputError, match=f"MOE_JAX_EXCHANGE is '{text}'"):
        Layer("full", 4)


def test_nothing_but_the_number_of_rows_is_kept_for_their_way_back():
    def sends(rows):
        buffer = Buffer.of(len(rows), 1, 1.0, ragged=False)
        counts = jnp.asarray([[[len(rows)]]], jnp.int32)
        return _send_fwd(rows, make_plan(counts, buffer, jnp.int32(0)), buffer)

    alone = functools.partial(jax.vmap, axis_name=AXIS)
    _, (_, kept) = jax.eval_shape(alone(sends), jax.ShapeDtypeStruct((1, 12, 8), jnp.float32))
    assert kept.shape[1] == 12 and kept.size == 0
