"""A kernel that the library does not know: chosen by the platform, and compared with its plain reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from moe_jax.kernels.by_platform import Bound, by_platform
from tests.support.numerics import assert_close, normal

BLOCK = 8


def reference(x, scale):
    """Rows times a factor for each column."""
    return x * scale[None, :]


def kernel(x, scale, *, core=None, interpret=False):
    """The same, a block of rows at a time."""
    rows, columns = x.shape

    def body(x_ref, scale_ref, out_ref):
        out_ref[...] = x_ref[...] * scale_ref[...]

    return pl.pallas_call(
        body,
        grid=(pl.cdiv(rows, BLOCK),),
        in_specs=[pl.BlockSpec((BLOCK, columns), lambda i: (i, 0)), pl.BlockSpec((1, columns), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((BLOCK, columns), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=interpret,
    )(x, scale[None, :])


def scaled(x, scale):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return by_platform(Bound(reference), x.dtype, out, tpu=Bound(kernel))(x, scale)


@pytest.mark.parametrize("rows", [1, 8, 21])
def test_it_equals_its_reference(rows):
    x, scale = normal(0, rows, 128), normal(1, 128)
    assert_close(kernel(x, scale, interpret=True), reference(x, scale))


def test_a_program_for_this_machine_has_the_reference():
    x, scale = normal(0, 21, 128), normal(1, 128)
    np.testing.assert_array_equal(jax.jit(scaled)(x, scale), reference(x, scale))


def test_a_program_for_a_tpu_has_the_kernel():
    shapes = jax.ShapeDtypeStruct((16, 128), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.float32)
    programs = {name: jax.export.export(jax.jit(scaled), platforms=[name])(*shapes) for name in ("cpu", "tpu")}
    has_kernel = {name: "tpu_custom_call" in program.mlir_module() for name, program in programs.items()}
    assert has_kernel == {"cpu": False, "tpu": True}
