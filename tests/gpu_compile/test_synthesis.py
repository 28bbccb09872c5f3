"""Products with kernels that are made on the way, at Mixtral's shape."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from moe_jax.experts.forms import LowRank, Quantized, Sparse
from moe_jax.experts.forms.kernel_of_codes import NF4
from moe_jax.experts.forms.optional import FormTiles
from moe_jax.experts.shapes import Matrix
from moe_jax.functional.sparse.by_entry import grouped_sparse_matmul
from moe_jax.functional.synthesis import synthesised_matmul
from tests.gpu_compile.compiling import MIB, compiled, needs_xla_gpu, shape

pytestmark = needs_xla_gpu

EXPERTS, SHAPE = 8, (4096, 14336)
KERNEL_MIB = SHAPE[0] * SHAPE[1] * 2 // MIB


def program(form, rows, *, backward):
    leaves = nnx.eval_shape(lambda: form.fresh(nnx.Rngs(0), Matrix("up", SHAPE), (EXPERTS,), jnp.dtype("bfloat16")))
    trained = {name: leaf for name, leaf in leaves.items() if form.is_trained(name, leaf)}
    fixed = {name: leaf for name, leaf in leaves.items() if name not in trained}
    base = shape(*SHAPE) if form.over_base else None
    tiles = FormTiles(form, SHAPE, SHAPE)

    def run(lhs, base, trained, fixed, sizes, dout):
        def product(lhs, base, trained):
            return synthesised_matmul(lhs, base, trained, fixed, sizes, tiles)

        y, pull = jax.vjp(product, lhs, base, trained)
        return (y, pull(dout)) if backward else y

    sizes = shape(EXPERTS, dtype="int32")
    return compiled(run, shape(rows, SHAPE[0]), base, trained, fixed, sizes, shape(rows, SHAPE[1]))


def test_low_rank_deltas_are_made_in_the_kernel_forward_and_backward():
    found = program(LowRank(rank=16), 8192, backward=True)
    assert {*found.kernels} == {"pallas_triton"}
    assert "while(" not in found.text
    assert found.temporaries <= 4 * MIB


@pytest.mark.parametrize("form", [Quantized(bits=2, group_size=128), Quantized(bits=3), NF4()], ids=lambda f: f.kind)
def test_a_few_rows_never_make_a_kernel(form):
    """As in decoding: codes in, and nothing of the size of a kernel in memory. NF4's scales are an eighth of it."""
    found = program(form, 4, backward=False)
    assert found.kernels == ["pallas_triton"]
    assert "while(" not in found.text
    assert found.temporaries <= KERNEL_MIB // 3 * MIB
    made = {(dtype, dims) for dtype, dims in found.arrays() if dims[-2:] == SHAPE and dtype != "u8"}
    assert made <= {("bf16", SHAPE)}  # the base, if there is one


@pytest.mark.parametrize(
    "form", [Quantized(bits=2, group_size=128), Sparse(rate=0.9), Sparse(rate=0.9, encoding="bitmap")],
    ids=lambda f: f.describe(),
)  # fmt: skip
def test_many_rows_hold_a_block_of_kernels_and_no_more(form):
    found = program(form, 8192, backward=True)
    assert not found.dynamic_loops
    assert (EXPERTS, *SHAPE) not in {dims for _, dims in found.arrays()}


@pytest.mark.parametrize("encoding", ["csr", "coo"])
def test_entries_of_sparse_deltas_are_multiplied_a_block_of_kernels_at_a_time(encoding):
    entries = Sparse(rate=0.999, encoding=encoding)
    leaves = nnx.eval_shape(lambda: entries.fresh(nnx.Rngs(0), Matrix("up", SHAPE), (EXPERTS,), jnp.dtype("bfloat16")))
    values = leaves.pop("values")

    def run(lhs, values, positions, sizes, dout):
        y, pull = jax.vjp(
            lambda lhs, values: grouped_sparse_matmul(lhs, values, positions, sizes, SHAPE[1]), lhs, values
        )
        return y, pull(dout)

    rows = 8192
    found = compiled(run, shape(rows, SHAPE[0]), values, leaves, shape(EXPERTS, dtype="int32"), shape(rows, SHAPE[1]))
    assert not found.dynamic_loops
    assert {*found.kernels} == {"pallas_triton"}
    assert (EXPERTS, *SHAPE) not in {dims for _, dims in found.arrays()}
    # One kernel, or its gradient, in float32, and the kernel rounded.
    assert found.temporaries <= (2 * KERNEL_MIB + KERNEL_MIB + 16) * MIB
