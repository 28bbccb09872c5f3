"""Applies optimizers for matrices to parameters that hold many matrices: layers stacked for `scan`, and experts.

Optax computes a root mean square, largest axes or singular vectors of whole arrays, but they are meant for one matrix.
A kernel of experts `[L, E, i, o]` is L * E matrices, each of which must be updated as if it were a parameter.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from moe_jax.distributed.sharding import path_name

# Last names of parameters whose last two axes are a matrix; the last axis of all others (norms, biases, values of
# sparse deltas) is a vector.
_MATRIX = re.compile(r"(^|/)(kernel|a|b|factor|neurons|embedding|positions|table)$|/adapters/(down|up)$")


def is_matrix(path: str) -> bool:
    """Whether the last two axes of the parameter at a path are a matrix."""
    return _MATRIX.search(path) is not None


def leading_axes(path: str, ndim: int) -> int:
    """Number of axes of a parameter before those of a matrix or vector: of layers, and of experts."""
    return max(0, ndim - (2 if is_matrix(path) else 1))


def per_matrix(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a transformation to every matrix, or vector, alone.

    Its state is a dict, path of the parameter (with dots) -> state of `inner`, whose arrays have the leading axes of
    the parameter; counters are shared. Layers are updated one after another, so that temporary arrays of `inner` exist
    for one layer and not for all.

    Args:
      inner: over a tree that is one array of one or two axes.
    """

    def init(params: Any) -> dict[str, Any]:
        return {
            _key(path): _init(inner, leading_axes(path_name(path), leaf.ndim))(leaf) for path, leaf in _leaves(params)
        }

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new_updates, new_state = [], {}
        values = [leaf for _, leaf in _leaves(params)]
        for (path, grad), value in zip(_leaves(updates), values, strict=True):
            axes = leading_axes(path_name(path), grad.ndim)
            made, new_state[_key(path)] = _update(inner.update, axes)(grad, state[_key(path)], value)
            new_updates.append(made)
        return jax.tree.unflatten(jax.tree.structure(updates), new_updates), new_state

    return optax.GradientTransformation(init, update)


def _leaves(tree: Any) -> list[tuple[tuple, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _key(path: tuple) -> str:
    return path_name(path).replace("/", ".")


def _init(inner: optax.GradientTransformation, axes: int) -> Callable[[jax.Array], Any]:
    """Maps `inner.init` over this many leading axes."""

    def init(value: jax.Array) -> Any:
        matrix = jax.ShapeDtypeStruct(value.shape[axes:], value.dtype)
        state, make = jax.eval_shape(inner.init, matrix), inner.init
        for _ in range(axes):
            make = jax.vmap(make, out_axes=_batched(state))
        return make(value)

    return init


def _update(inner: Callable, axes: int) -> Callable:
    """Maps `inner.update` over this many leading axes: the first one in a loop, the others at once."""

    def update(grad: jax.Array, state: Any, value: jax.Array) -> tuple[jax.Array, Any]:
        if axes == 0:
            return inner(grad, state, value)
        where, call = _batched(state), inner
        for _ in range(axes - 1):
            call = jax.vmap(call, in_axes=(0, where, 0), out_axes=(0, where))
        leaves, structure = jax.tree.flatten(state)
        mapped = [leaf for leaf in leaves if leaf.ndim]

        def one(layer: tuple) -> tuple[jax.Array, list[jax.Array]]:
            grad, arrays, value = layer
            rest = iter(arrays)
            own = jax.tree.unflatten(structure, [next(rest) if leaf.ndim else leaf for leaf in leaves])
            made, new = call(grad, own, value)
            return made, jax.tree.leaves(new)

        made, new = jax.lax.map(one, (grad, mapped, value))
        # Counters are equal for all layers: one is kept.
        shared = [one if old.ndim else one[0] for one, old in zip(new, leaves, strict=True)]
        return made, jax.tree.unflatten(structure, shared)

    return update


def _batched(state: Any) -> Any:
    """Returns the axes for `vmap`: arrays are mapped over, counters are not."""
    return jax.tree.map(lambda leaf: 0 if jnp.ndim(leaf) else None, state)
