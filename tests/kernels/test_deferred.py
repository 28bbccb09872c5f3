"""Functions that are traced when the program is lowered."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax.kernels.by_platform import deferred
from tests.support.jaxprs import equations


def scaled_product(a, b, *, scale):
    return scale * (a @ b)


def call(a, b):
    out = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)
    return deferred(scaled_product, a, b, out=out, scale=2.0)


A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(12, dtype=np.float32).reshape(3, 4)


def test_it_computes_jitted_or_not():
    np.testing.assert_array_equal(call(A, B), 2 * A @ B)
    np.testing.assert_array_equal(jax.jit(call)(A, B), 2 * A @ B)


def test_it_can_be_batched():
    many = np.stack([A, A + 1, A - 1])
    np.testing.assert_array_equal(jax.vmap(call, in_axes=(0, None))(many, B), 2 * many @ B)
    np.testing.assert_array_equal(jax.jit(jax.vmap(call, in_axes=(2, None)))(many.transpose(1, 2, 0), B), 2 * many @ B)


def test_the_program_that_is_traced_has_nothing_of_the_function():
    names = [equation.primitive.name for equation in equations(jax.make_jaxpr(call)(A, B))]
    assert names == ["deferred"]


def test_a_branch_for_another_platform_is_never_traced():
    def fail(a, b):
        raise AssertionError("traced")

    def choose(a, b):
        elsewhere = lambda a, b: deferred(fail, a, b, out=jax.ShapeDtypeStruct((2, 4), jnp.float32))  # noqa: E731
        return lax.platform_dependent(a, b, cpu=jnp.matmul, cuda=elsewhere, default=elsewhere)

    np.testing.assert_array_equal(jax.jit(choose)(A, B), A @ B)
    np.testing.assert_array_equal(choose(A, B), A @ B)


def test_trees_go_in_and_come_out():
    def function(tree, nothing, b, *, sign):
        assert nothing is None
        return {"sum": tree["a"] + b, "pair": (sign * b, tree["c"])}

    tree = {"a": A, "c": np.int32(3)}
    out = jax.eval_shape(lambda tree, b: function(tree, None, b, sign=-1), tree, A)
    got = jax.jit(lambda tree, b: deferred(function, tree, None, b, out=out, sign=-1))(tree, A + 1)
    chex.assert_trees_all_equal(got, {"sum": 2 * A + 1, "pair": (-A - 1, np.int32(3))})


def test_a_program_that_the_compiler_divides_has_another_function():
    def divided(a, b):
        return -2 * (a @ b)

    def choose(a, b):
        out = jax.ShapeDtypeStruct((a.shape[0], 4), a.dtype)
        return deferred(scaled_product, a, b, out=out, divided=divided, scale=2.0)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows = jax.device_put(A, jax.NamedSharding(mesh, jax.P("data")))
    np.testing.assert_array_equal(jax.jit(choose)(A, B), 2 * A @ B)
    np.testing.assert_array_equal(jax.jit(choose)(rows, B), -2 * A @ B)
    many = jax.jit(jax.vmap(lambda a, b: choose(a[None], b), in_axes=(0, None)))
    np.testing.assert_array_equal(many(rows, B)[:, 0], -2 * A @ B)
    with jax.set_mesh(mesh):
        each = jax.shard_map(choose, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P("data"))
        np.testing.assert_array_equal(jax.jit(each)(rows, B), 2 * A @ B)
