"""What an MoE gives for a token does not depend on padding, its amount and content, nor on neighbours."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.distributed.sharding import leaf_spec, make_mesh, path_name
from moe_jax.experts import set_strategy
from moe_jax.models import AdapterConfig, BankConfig, FFNConfig, MoEConfig, PerftConfig
from moe_jax.nn.moe import MoE
from tests.support.numerics import assert_close, randomised
from tests.support.tiers import long, one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

D_MODEL, TEXTS, LONGEST, PADDED = 8, 8, 5, 7
FFN = FFNConfig(dim=16, bias=True)
ADAPTER = AdapterConfig(rank=3, activation="silu")


def moe(bank=None, **options):
    return MoEConfig(expert=FFN, num_experts=4, top_k=2, bank=BankConfig(**(bank or {})), **options)


LOW_RANK, SPARSE = {"kind": "low-rank", "rank": 3}, {"kind": "sparse", "rate": 0.8}
ROUTED = PerftConfig(variant="routed", adapter=ADAPTER, num_experts=3, top_k=2)
# Small adapters lie side by side; of many, rows are sorted.
MANY = PerftConfig(variant="routed", adapter=AdapterConfig(rank=16), num_experts=64, top_k=2)
EMBEDDED = dataclasses.replace(ROUTED, variant="embedded", num_experts=4, top_k=None)
# What there is, how it is applied, and in half of the cases so little room that assignments are dropped.
CASES = {
    "full, capacity": (moe(capacity_factor=0.6), "auto"),
    "low-rank side by side, capacity": (moe(LOW_RANK, capacity_factor=0.6), "factored-side-by-side"),
    "low-rank grouped": (moe(LOW_RANK), "factored-grouped"),
    "low-rank synthesised": (moe(LOW_RANK), "synthesised"),
    "sparse entrywise": (moe(SPARSE), "factored-entrywise"),
    "PESC": (moe({"kind": "adapter", "adapter": ADAPTER}), "auto"),
    "PERFT-R": (moe(perft=ROUTED), "auto"),
    "PERFT-R sorted": (moe(perft=MANY), "auto"),
    "PERFT-E, capacity": (moe(perft=EMBEDDED, capacity_factor=0.6), "auto"),
    "coder": (moe(universal="coder"), "auto"),
    "coder extended, capacity": (moe(LOW_RANK, universal="coder", extended=True, capacity_factor=0.6), "synthesised"),
    "merged, capacity": (moe(merged_experts=3, capacity_factor=0.6), "auto"),
}


@functools.cache
def random_layer(config):
    """A layer in which nothing is zero."""
    return randomised(lambda: MoE(config, D_MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32))


@functools.cache
def program(name):
    """Gradients of all valid tokens to parameters and activations, the output and the statistics."""
    config, strategy = CASES[name]
    graphdef = random_layer(config)[0]

    def value(params, x, rest, target, valid):
        layer = nnx.merge(graphdef, params, rest)
        set_strategy(layer, strategy)
        y, stats = layer(x, valid)
        return jnp.sum(jnp.where(valid[:, :, None], y * target, 0.0)), (y, stats)

    return jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))


def results(name, texts, targets, left, padding_scale, seed, put=lambda tree: tree):
    """Texts laid into rows of padding: gradients to parameters, and per text gradients, outputs; and statistics."""
    _, params, rest = random_layer(CASES[name][0])
    rng = np.random.default_rng(seed)
    x = padding_scale * rng.standard_normal((TEXTS, PADDED, D_MODEL)).astype(np.float32)
    target, valid = np.zeros_like(x), np.zeros(x.shape[:2], bool)
    places = [(row, slice(start, start + len(text))) for row, (start, text) in enumerate(zip(left, texts, strict=True))]
    for place, text, wanted in zip(places, texts, targets, strict=True):
        x[place], target[place], valid[place] = text, wanted, True
    arrays = put((params, rest)), map(jnp.asarray, (x, target, valid))
    (params, rest), (x, target, valid) = arrays
    (dparams, dx), (y, stats) = program(name)(params, x, rest, target, valid)
    return dparams, [np.asarray(dx)[place] for place in places], [np.asarray(y)[place] for place in places], stats


def draw(seed):
    """Texts of different lengths, what their outputs are multiplied with, and two ways to lay them into rows."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LONGEST + 1, TEXTS)
    texts, targets = ([rng.standard_normal((n, D_MODEL)).astype(np.float32) for n in lengths] for _ in range(2))
    left, right = ([int(rng.integers(0, PADDED - n + 1)) for n in lengths] for _ in range(2))
    return texts, targets, left, right


@one_in(12)
@pytest.mark.parametrize("name", CASES)
def test_padding_changes_nothing(name):
    @settings(max_examples=4)
    @given(st.integers(0, 999))
    def check(seed):
        texts, targets, some, others = draw(seed)
        expected = results(name, texts, targets, some, 0.0, seed)
        # Elsewhere in the row, and with large entries in it.
        assert_close(results(name, texts, targets, others, 10.0, seed + 1), expected)

    check()


@one_in(2)
@pytest.mark.parametrize("name", ["full, capacity", "low-rank synthesised"])
def test_neighbours_change_nothing(name):
    rng = np.random.default_rng(0)
    texts, others, targets = rng.standard_normal((3, TEXTS, PADDED, D_MODEL)).astype(np.float32)
    others[1::2] = texts[1::2]
    one, other = (results(name, some, targets, [0] * TEXTS, 0.0, 0)[1:3] for some in (texts, others))
    for per_text, with_others in zip(one, other, strict=True):
        assert_close(with_others[1::2], per_text[1::2])


@long
@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "expert": 2}, {"expert": 4, "tensor": 2}], ids=str)
@pytest.mark.parametrize("name", ["full, capacity", "PERFT-R sorted", "low-rank synthesised"])
def test_padding_changes_nothing_over_a_mesh(name, axes):
    texts, targets, some, others = draw(0)
    expected = results(name, texts, targets, some, 0.0, 0)
    mesh = make_mesh(axes)

    def put(tree):
        def place(path, leaf):
            spec = leaf_spec("layers/0/mlp/" + path_name(path).split("/", 1)[1])
            return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))

        return jax.tree_util.tree_map_with_path(place, tree)

    program.cache_clear()
    with jax.set_mesh(mesh):
        got = results(name, texts, targets, others, 10.0, 1, put)
    program.cache_clear()
    assert_close(got, expected)
