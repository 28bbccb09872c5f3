"""Products with kernels that Triton's grouped product makes, run by the interpreter, for every form that has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.experts.forms import LowRank, Quantized
from moe_jax.experts.forms.kernel_of_codes import NF4
from moe_jax.experts.forms.optional import FormTiles
from moe_jax.experts.shapes import Matrix
from moe_jax.functional.codes import quantize_nf4
from moe_jax.kernels.gpu.grouped import TritonProducts
from tests.support.environment import INTERPRET
from tests.support.tiers import one_in

pytestmark = pytest.mark.usefixtures("strict_numerics")

ROWS, SIZES = 21, [5, 0, 10]
# Tiles divide no axis; two blocks of NF4's scales.
SHAPE = (72, 37)


def random_leaves(form, rng):
    if isinstance(form, NF4):
        kernels = jnp.asarray(rng.standard_normal((len(SIZES), *SHAPE)), jnp.float32)
        return {f"nf4/{name}": leaf for name, leaf in quantize_nf4(kernels).items()}
    leaves = jax.eval_shape(lambda: form.fresh(nnx.Rngs(0), Matrix("up", SHAPE), (len(SIZES),), jnp.dtype(jnp.float32)))
    return {
        name: jnp.asarray(rng.integers(0, 256, leaf.shape), jnp.uint8)
        if leaf.dtype == jnp.uint8
        else jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
        for name, leaf in leaves.items()
    }


@one_in(3)
@pytest.mark.parametrize(
    ("form", "origin"),
    [
        (LowRank(rank=5), None),
        (Quantized(bits=1), None),
        (Quantized(bits=2, group_size=24), (24, 5)),
        (Quantized(bits=3, group_size=16), (16, 0)),
        (Quantized(bits=4), None),
        (Quantized(bits=8, group_size=8), None),
        (NF4(), (16, 0)),
        (NF4(), None),
        (NF4(), (0, 5)),
    ],
    ids=lambda value: value.describe() if hasattr(value, "describe") else str(value),
)
def test_products(form, origin):
    """With an origin, the kernels are the part below and right of it; of whole kernels the rows are split in bytes."""
    rng = np.random.default_rng(0)
    leaves, shape = random_leaves(form, rng), SHAPE
    base = jnp.asarray(rng.standard_normal(SHAPE), jnp.float32) if form.over_base else None
    tiles = FormTiles(form, SHAPE, SHAPE)
    each = [{name: leaf[e] for name, leaf in leaves.items()} for e in range(len(SIZES))]
    kernels = np.array(jax.jit(lambda each: jnp.stack([tiles.tile(base, own, 0, SHAPE[1]) for own in each]))(each))
    if origin is not None:
        row, column = origin
        shape = (SHAPE[0] - row, SHAPE[1] - column)
        kernels = kernels[:, row:, column:]
        base = None if base is None else base[row:, column:]
        codes = "nf4/codes" if isinstance(form, NF4) else "codes"
        first_byte = row * (4 if isinstance(form, NF4) else form.bits) // 8
        leaves[codes] = leaves[codes][:, first_byte:, column:]
        per_column = "nf4/scale_codes" if isinstance(form, NF4) else "scales"
        leaves[per_column] = leaves[per_column][:, :, column:]
        leaves["origin"] = jnp.broadcast_to(jnp.asarray(origin, jnp.int32)[None, :], (len(SIZES), 2))
        tiles = FormTiles(form, shape, SHAPE)
    made = tiles.in_triton(leaves)

    group = np.searchsorted(np.cumsum(SIZES), np.arange(ROWS), side="right")
    kernels = np.concatenate([kernels, np.zeros((1, *shape))])[group]
    lhs, dout = (jnp.asarray(rng.standard_normal((ROWS, size)), jnp.float32) for size in shape)

    @jax.jit
    def products(lhs, dout):
        product, sizes = TritonProducts(None, interpret=INTERPRET).made_product, jnp.asarray(SIZES, jnp.int32)
        arguments = base, made.arrays, sizes, made.maker, shape
        return product(lhs, *arguments), product(dout, *arguments, transposed=True)

    y, dlhs = products(lhs, dout)
    np.testing.assert_allclose(y, np.einsum("mi,mio->mo", lhs, kernels), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dlhs, np.einsum("mo,mio->mi", dout, kernels), rtol=1e-5, atol=1e-4)
