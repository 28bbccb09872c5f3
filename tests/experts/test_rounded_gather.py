"""Sums that are scattered, in one step and in two, gradients of what is gathered, and what is rounded before it is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from moe_jax.distributed.sharding import AXES, make_mesh
from moe_jax.experts import exchange, over_mesh
from moe_jax.experts.exchange import gathered, scattered_sum
from moe_jax.experts.forms import Full, LowRank
from moe_jax.experts.hidden_rows import Kernels
from moe_jax.experts.shapes import BASE, Matrix


@pytest.mark.parametrize(("shape", "axis"), [((3, 16, 5), 1), ((8, 4), 0), ((2, 3, 24), 2)])
def test_two_steps_give_every_device_the_part_of_one(shape, axis, monkeypatch):
    # With eight devices: two times four.
    monkeypatch.setattr(exchange, "_TWO_SIDES", 8)
    mesh = make_mesh({"fsdp": 8})
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-99, 99, (8, *shape)), jnp.float32)
    spec = P(*[None] * axis, "fsdp")

    def summed(in_two, x):
        return scattered_sum(x[0], "fsdp", axis, in_two=in_two)

    with jax.set_mesh(mesh):
        one, two = (
            jax.jit(jax.shard_map(partial(summed, in_two), in_specs=P("fsdp"), out_specs=spec, check_vma=False))
            for in_two in (False, True)
        )
        assert "reduce-scatter" in two.lower(x).compile().as_text()
        np.testing.assert_array_equal(one(x), x.sum(axis=0))
        np.testing.assert_array_equal(two(x), x.sum(axis=0))


@pytest.mark.parametrize("shape", [(1, 16, 3), (2, 8, 3)])
def test_the_gradient_is_that_of_the_whole(shape):
    mesh = make_mesh({"fsdp": 8})
    rng = np.random.default_rng(1)
    kernel, weights = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    split, whole = P(None, "fsdp", None), P(None, None, None)

    def value(kernel, weights):
        # Every device has a share of the sum.
        def on_device(kernel, weights):
            mine = (jax.lax.axis_index("fsdp") + 1.0) * weights
            return jax.lax.psum(jnp.sum(jnp.sin(gathered(kernel, split, whole, jnp.float32)) * mine), "fsdp")

        return jax.shard_map(on_device, in_specs=(split, whole), out_specs=P(), check_vma=False)(kernel, weights)

    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(value))(kernel, weights)
    np.testing.assert_allclose(found, 36 * weights * jnp.cos(kernel), rtol=1e-5, atol=1e-5)


KERNEL, BASE_KERNEL = P("expert", "fsdp", "tensor"), P("fsdp", "tensor")
OVER_BOTH = ("fsdp", "sequence")


@pytest.mark.parametrize(
    ("sizes", "kernel", "base"),
    [
        ({"data": 8}, None, None),  # nothing is split: the product rounds what it reads
        ({"tensor": 4, "expert": 2}, None, None),
        ({"fsdp": 4, "expert": 2}, KERNEL, BASE_KERNEL),  # there is an expert of zeros more
        ({"sequence": 2}, P("expert", OVER_BOTH, "tensor"), P(OVER_BOTH, "tensor")),
        ({"fsdp": 4, "sequence": 2, "expert": 3}, P("expert", OVER_BOTH, "tensor"), P(OVER_BOTH, "tensor")),
        ({"fsdp": 2, "sequence": 3}, KERNEL, BASE_KERNEL),  # which does not divide it
        ({"sequence": 3}, None, None),
    ],
)
def test_what_is_rounded_before_it_is_gathered(sizes, kernel, base):
    mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)
    matrix = Matrix("up", (16, 24), "out")
    kernels = Kernels(Full(), matrix, {"kernel": jax.ShapeDtypeStruct((3, 16, 24), jnp.float32)})
    assert over_mesh._split_specs(kernels, mesh) == ({} if kernel is None else {"kernel": kernel})
    delta = {"a": jax.ShapeDtypeStruct((3, 16, 2), jnp.float32), "b": jax.ShapeDtypeStruct((3, 2, 24), jnp.float32)}
    over_base = Kernels(LowRank(rank=2), matrix, {BASE: jax.ShapeDtypeStruct((16, 24), jnp.float32), **delta})
    assert over_mesh._split_specs(over_base, mesh) == ({} if base is None else {BASE: base})
