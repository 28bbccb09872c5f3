"""Linear maps with NF4 kernels over a mesh: the product of one device, and only codes travel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.distributed.sharding import make_mesh
from moe_jax.experts.forms.kernel_of_codes import nf4_linear
from moe_jax.functional.codes import dequantize_nf4, quantize_nf4

pytestmark = pytest.mark.usefixtures("strict_numerics")

# On four shards of the tensor axis, one begins inside a block.
ROWS, COLUMNS = 72, 40
SPECS = {"out": P("fsdp", "tensor"), "in": P("tensor", "fsdp")}


def step(split):
    def value(x, leaves, target):
        y = nf4_linear(x, leaves, ROWS, split)
        return jnp.sum(y * target), y

    return jax.jit(jax.grad(value, has_aux=True))


@pytest.mark.parametrize(
    "axes, batch, split",
    [
        ({"fsdp": 4, "data": 2}, 8, "out"),
        ({"fsdp": 2, "tensor": 4}, 8, "out"),
        ({"fsdp": 2, "tensor": 4}, 8, "in"),
        ({"expert": 4, "tensor": 2}, 3, "in"),
    ],
)
def test_product_and_gradient_over_a_mesh(axes, batch, split):
    rng = np.random.default_rng(0)
    leaves = quantize_nf4(rng.standard_normal((ROWS, COLUMNS), np.float32))
    x, target = (rng.standard_normal((batch, 3, n), np.float32) for n in (ROWS, COLUMNS))
    kernel = np.asarray(dequantize_nf4(leaves, ROWS, jnp.float32))
    mesh = make_mesh(axes)
    leaves["codes"] = jax.device_put(leaves["codes"], NamedSharding(mesh, SPECS[split]))
    with jax.set_mesh(mesh):
        compiled = step(split).lower(x, leaves, target).compile()
        dx, y = compiled(x, leaves, target)
    np.testing.assert_allclose(y, x @ kernel, atol=1e-4)
    np.testing.assert_allclose(dx, target @ kernel.T, atol=1e-4)
    gathered = re.findall(r"= (\w+)\[[\d,]+\]\S* (?:all-gather|collective-permute)\(", compiled.as_text())
    # Products of shards are added up, which is another operation; kernels travel as codes.
    assert set(gathered) <= {"u8"}, gathered
