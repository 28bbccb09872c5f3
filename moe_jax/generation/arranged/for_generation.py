"""Arranges a model for a CPU, and leaves it as it is elsewhere."""

from typing import TypeVar

import jax
from flax import nnx

from moe_jax.experts.devices import current_chip, current_mesh
from moe_jax.generation.arranged.as_bits import give_as_bits
from moe_jax.generation.arranged.sparse_deltas import arrange_by_column

_M = TypeVar("_M", bound=nnx.Module)


def arranged(model: _M) -> _M:
    """Returns a model that gives the same logits, arranged to generate on a CPU; elsewhere, or over a mesh, the model.

    Sparse deltas lie by column (`arranged.sparse_deltas`), and whole kernels in bfloat16 are given as their bits
    (`arranged.as_bits`). All other arrays are those of the model, which stays as it is.

    Args:
      model: its arrays, or only their shapes, of which sparse deltas stay as they are.
    """
    if not _can_be(model):
        return model
    copy = nnx.merge(*nnx.split(model), copy=True)
    arrange(copy)
    return copy


def arrange(model: nnx.Module) -> None:
    """Does in place what `arranged` does with a copy."""
    if _can_be(model):
        arrange_by_column(model)
        give_as_bits(model)


def _can_be(model: nnx.Module) -> bool:
    leaves = jax.tree.leaves(nnx.state(model))
    on_one = all(isinstance(leaf, jax.ShapeDtypeStruct) or len(leaf.devices()) == 1 for leaf in leaves)
    return current_chip().platform == "cpu" and current_mesh() is None and on_one
