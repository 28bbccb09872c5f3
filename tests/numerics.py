"""How results are compared with a reference, how those of a module are found, and modules in which nothing is zero.

Modules are made in one program, and random numbers are drawn by NumPy: operation by operation, every shape of every
operation is compiled on its own, which takes longer than all that is tested with it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def normal(seed, *shape, scale=1.0):
    """Float32[shape] of the normal distribution."""
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def made_at_once(make):
    """The module that `make()` gives, made by one program."""
    return nnx.jit(make)()


def randomised(module):
    """The module's graphdef, its parameters, all drawn anew and in float32, and the rest of its state."""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    rng = np.random.default_rng(1)
    # Scales are bfloat16 otherwise, and so would their gradients be, which no float32 reference equals.
    drawn = jax.tree.map(lambda a: jnp.asarray(0.5 * rng.standard_normal(a.shape), jnp.float32), params)
    return graphdef, drawn, rest


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
