"""Arranges a model for a CPU, and leaves it as it is elsewhere."""

from typing import TypeVar

from flax import nnx

from moe_jax.distributed.sharding import mesh_of
from moe_jax.experts.arrangements.as_bits import give_as_bits, transpose_kernels
from moe_jax.experts.arrangements.sparse_deltas import arrange_by_column
from moe_jax.experts.devices import current_chip, current_mesh
from moe_jax.nn.layers import Head

_M = TypeVar("_M", bound=nnx.Module)


def arranged(model: _M) -> _M:
    """Returns a model that gives the same logits, arranged to generate on a CPU; elsewhere, or over a mesh, the model.

    Sparse deltas lie by column (`arrangements.sparse_deltas`), and whole kernels in bfloat16 are given as their bits
    (`arrangements.as_bits`). All other arrays are those of the model, which stays as it is.

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
    if not _can_be(model):
        return
    arrange_by_column(model)
    give_as_bits(model)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Head) and not module.is_tied and module.codes is None:
            module.codes = transpose_kernels(module)


def _can_be(model: nnx.Module) -> bool:
    on_one = current_mesh() is None and mesh_of(nnx.state(model)) is None
    return current_chip().platform == "cpu" and on_one
