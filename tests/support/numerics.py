"""How results are compared with a reference, how those of a module are found, and modules in which nothing is zero.

Modules are made in one program, and random numbers are drawn by NumPy: operation by operation, every shape of every
operation is compiled on its own, which takes longer than all that is tested with it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.distributed.sharding import path_name


def normal(seed, *shape, scale=1.0):
    """Float32[shape] of the normal distribution."""
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def initialised(make, seed=0):
    """The module of float parameters that `make()` gives, drawn like it by NumPy: nothing is compiled."""
    graphdef, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        assert jnp.issubdtype(leaf.dtype, jnp.floating)
        name = path_name(path)
        if name.endswith("scale"):
            return jnp.ones(leaf.shape, leaf.dtype)
        return jnp.asarray((not name.endswith("bias")) * 0.02 * rng.standard_normal(leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, state))


def made_at_once(make):
    """The module that `make()` gives, made by one program."""
    return nnx.jit(make)()


def randomised(make):
    """The graphdef of the module that `make()` gives, parameters drawn anew in float32, and the rest of its state."""
    graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    if jax.tree.leaves(rest):
        rest = jax.jit(lambda: nnx.state(make(), nnx.Not(nnx.Param)))()
    rng = np.random.default_rng(1)
    # Scales are bfloat16 otherwise, and so would their gradients be, which no float32 reference equals.
    drawn = jax.tree.map(lambda a: jnp.asarray(0.5 * rng.standard_normal(a.shape), jnp.float32), params)
    return graphdef, drawn, rest


@nnx.jit
def logits_of(model, tokens, **given):
    """What a decoder says of `tokens`."""
    return model(tokens, **given).logits


def assert_close(got, expected, tolerance=1e-5):
    """Every leaf within the tolerance, relative to the largest entry of the expected one where that is above 1."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(np.max(np.abs(b))))
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=tolerance)


def gradients_and_output(graphdef, rest, apply):
    """A program `(params, x, target)` -> gradients of `sum(apply(module, x) * target)` to both, and the output."""

    def value(params, x, target):
        y = apply(nnx.merge(graphdef, params, rest), x)
        return jnp.sum(y * target), y

    return jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))


def from_csr(columns, row_ends, shape):
    """Flat positions, int64, of entries in compressed sparse rows: the inverse of `experts.forms.sparse.to_csr`."""
    rows = np.repeat(np.arange(shape[0]), np.diff(row_ends, prepend=0))
    return rows * shape[1] + columns.astype(np.int64)
