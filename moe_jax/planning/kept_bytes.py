"""The bytes that a microbatch keeps for its backward pass."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.training.program import Program, abstract_batch
from moe_jax.training.recipe.schema import Recipe
from moe_jax.training.step import make_loss


def kept_bytes(program: Program, recipe: Recipe) -> int:
    """Returns the bytes that a microbatch keeps for its backward pass, traced by JAX, without parameters and batch."""
    loss = make_loss(program.graphdef, program.config, accumulation=recipe.train.accumulation)
    rows = recipe.train.batch_size // recipe.train.accumulation
    micro = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, batch_size=rows, accumulation=1))

    def kept(params: nnx.State, frozen: nnx.State, batch: dict[str, jax.Array]) -> list[jax.Array]:
        key = jax.random.key(recipe.seed)
        _, vjp, _ = jax.vjp(lambda params: loss(params, frozen, batch, 1.0, key), params, has_aux=True)
        return jax.tree.leaves(vjp)

    with jax.set_mesh(program.mesh):
        batch = abstract_batch(micro, program.config, program.mesh)
        traced = jax.make_jaxpr(kept)(program.state.params, program.frozen, batch).jaxpr
    given = {id(var) for var in (*traced.invars, *traced.constvars)}
    found = {id(var): var.aval for var in traced.outvars if id(var) not in given}
    return sum(
        math.prod(getattr(aval, "shape", ())) * np.dtype(aval.dtype).itemsize
        for aval in found.values()
        if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    )
