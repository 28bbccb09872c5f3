"""Rows times kernels of several forms are those times the kernels that the forms stand for."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.core.data_sheets import CHIPS
from moe_jax.experts.devices import Platform
from moe_jax.experts.forms import LowRank, Quantized, Sparse
from moe_jax.experts.forms.several_forms import SeveralForms
from moe_jax.experts.shapes import BASE, Load, Matrix
from tests.support.numerics import assert_close

MATRIX, ROWS = Matrix("up", (16, 24), "out"), 12
FORM = SeveralForms(forms=(Quantized(bits=2), LowRank(rank=3), Quantized(bits=4, group_size=8)), counts=(2, 1, 3))


def drawn() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)

    def leaf(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if shape.dtype == jnp.uint8:
            return jnp.asarray(rng.integers(0, 256, shape.shape), jnp.uint8)
        return jnp.asarray(rng.standard_normal(shape.shape), shape.dtype)

    return jax.tree.map(leaf, FORM.leaves(MATRIX, (), jnp.dtype(jnp.float32)))


ARRAYS, BASE_KERNEL = drawn(), jnp.asarray(np.random.default_rng(1).standard_normal(MATRIX.shape), jnp.float32)


@jax.jit
def products(rows, sizes):
    synthesised = FORM.grouped(rows, ARRAYS | {BASE: BASE_KERNEL}, sizes, MATRIX)
    return synthesised, FORM.grouped_delta(rows, ARRAYS, sizes, MATRIX, "grouped")


@settings(max_examples=15)
@given(st.lists(st.integers(0, 4), min_size=6, max_size=6).filter(lambda sizes: sum(sizes) <= ROWS), st.integers(0, 9))
def test_every_row_meets_the_kernel_of_its_expert(sizes, seed):
    rows = np.random.default_rng(seed).standard_normal((ROWS, MATRIX.shape[0])).astype(np.float32)
    over_base, alone = np.zeros((2, ROWS, MATRIX.shape[1]), np.float32)
    first = 0
    for expert, size in enumerate(sizes):
        own = FORM.of_expert(expert)
        kernel = np.asarray(own.form.materialise(BASE_KERNEL, own.arrays(ARRAYS), MATRIX))
        of_expert = slice(first, first + size)
        over_base[of_expert] = rows[of_expert] @ kernel
        alone[of_expert] = rows[of_expert] @ (kernel - np.asarray(BASE_KERNEL))
        first += size
    assert_close(products(rows, jnp.asarray(sizes, jnp.int32)), (over_base, alone))


def test_experts_are_numbered_part_by_part():
    assert FORM.num_experts == 6
    for leaf, experts in {"part0/codes": [0, 1], "part1/a": [2], "part2/codes": [3, 4, 5]}.items():
        assert FORM.experts_with(leaf) == experts
        assert [FORM.of_expert(expert).index for expert in experts] == list(range(len(experts)))
        assert FORM.leaves(MATRIX, (), jnp.dtype(jnp.float32))[leaf].shape[0] == len(experts)


def test_it_costs_what_its_parts_cost():
    expert_bytes = [FORM.of_expert(expert).form.own_bytes([MATRIX], 4) for expert in range(6)]
    assert FORM.own_bytes([MATRIX], 4) == np.mean(expert_bytes)


def test_a_part_that_does_not_have_a_way_is_grouped():
    low_rank, sparse = LowRank(rank=3), Sparse(rate=0.5, encoding="coo")
    given = [MATRIX], Load(2, 4, 1), Platform.of(CHIPS["cpu"], 4)
    both = SeveralForms(forms=(low_rank, sparse), counts=(1, 1)).delta_costs(*given)
    alone = low_rank.delta_costs(*given)["grouped"].total, sparse.delta_costs(*given)["entrywise"].total
    assert {*both} == {"grouped", "entrywise"} and both["entrywise"].total == max(alone)


def test_a_layer_of_it_is_made_like_others():
    made = FORM.fresh(nnx.Rngs(0), MATRIX, (6,), jnp.dtype(jnp.float32))
    assert {path: leaf.shape for path, leaf in made.items()} == {path: leaf.shape for path, leaf in ARRAYS.items()}
