"""Rows that move: to other slots, in caches of another number and length; and what has to be compiled for it."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from moe_jax.generation.ahead import Ahead
from moe_jax.generation.continued_rows import Rows
from moe_jax.models import ModelConfig
from moe_jax.nn import Caches, init_cache


class Size(NamedTuple):
    """A number of rows, and the tokens that their caches have room for: with these two programs differ."""

    width: int
    length: int


def shapes_of(rows: Rows) -> Rows:
    """Returns the rows' shapes, which stay when the rows are updated in place."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), rows)


class Mover:
    """Moves rows of a model.

    Caches are moved one by one, as those of all layers are alike: a program for all of them together would take long to
    compile for every size before and after.

    Args:
      config: of the model.
      stacked: whether its layers are stacked.
    """

    def __init__(self, config: ModelConfig, stacked: bool):
        self._config, self._stacked = config, stacked
        self._take, self._move_cache = Ahead(_take), Ahead(_move_cache)
        self._put, self._put_cache = Ahead(_put), Ahead(_put_cache)

    def resized(self, shapes: Rows, size: Size) -> Rows:
        """Returns the shapes that rows, which have a key each, have in another size.

        Rings, once they go round, have as many places as they need.
        """

        def make() -> Caches:
            width, length = size
            return init_cache(self._config, width, length, jnp.dtype(jnp.float32), stacked=self._stacked, rings=True)

        caches = jax.tree.map(
            lambda one, new: jax.ShapeDtypeStruct(new.shape, one.dtype), shapes.caches, jax.eval_shape(make)
        )
        rest = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct((size.width, *one.shape[1:]), one.dtype), shapes._replace(caches=())
        )
        return rest._replace(caches=caches)

    def move(self, rows: Rows, slots: Sequence[int], size: Size) -> Rows:
        """Returns the rows in other slots (-1: none comes there) of another size, whose caches are not shorter.

        All that come are active. The places of a shorter cache are the first ones of a longer one.
        """
        taken = jnp.asarray(np.maximum(slots, 0), jnp.int32)
        after = self.resized(shapes_of(rows), size)
        caches = jax.tree.map(
            lambda one, new: self._move_cache(static={"shape": new.shape}, cache=one, slots=taken),
            rows.caches,
            after.caches,
        )
        moved: Rows = self._take(rows=rows._replace(caches=()), slots=taken)
        return moved._replace(caches=caches, active=jnp.asarray(np.asarray(slots) >= 0))

    def put(self, rows: Rows, row: Rows, slot: int) -> Rows:
        """Returns the rows with `row` in a slot; they are updated in place.

        What was in the later places of the slot's caches cannot be seen: they are of later positions, and written
        before those are reached.
        """
        at = jnp.int32(slot)
        caches = jax.tree.map(
            lambda all_, one: self._put_cache(caches=all_, cache=one, slot=at), rows.caches, row.caches
        )
        rest: Rows = self._put(rows=rows._replace(caches=()), row=row._replace(caches=()), slot=at)
        return rest._replace(caches=caches)

    def compile(self, before: Rows, after: Rows, row: Rows | None) -> None:
        """Compiles what moves rows from some shapes to others, and puts a row there."""
        slots, slot = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (after.tokens.shape, ()))
        self._take.compile(rows=before._replace(caches=()), slots=slots)
        for one, new in zip(*map(jax.tree.leaves, (before.caches, after.caches)), strict=True):
            self._move_cache.compile(static={"shape": new.shape}, cache=one, slots=slots)
        if row is not None:
            self._put.compile(rows=after._replace(caches=()), row=row._replace(caches=()), slot=slot)
            for all_, one in zip(*map(jax.tree.leaves, (after.caches, row.caches)), strict=True):
                self._put_cache.compile(caches=all_, cache=one, slot=slot)


@jax.jit
def _take(rows: Rows, slots: Int[Array, " n"]) -> Rows:
    return jax.tree.map(lambda one: jnp.take(one, slots, axis=0), rows)


@partial(jax.jit, static_argnames="shape")
def _move_cache(cache: Array, slots: Int[Array, " n"], shape: tuple[int, ...]) -> Array:
    taken = jnp.take(cache, slots, axis=1)
    larger = [(0, after - before) for before, after in zip(taken.shape, shape, strict=True)]
    return jnp.pad(taken, larger) if any(after for _, after in larger) else taken


@partial(jax.jit, donate_argnames="rows")
def _put(rows: Rows, row: Rows, slot: Int[Array, ""]) -> Rows:
    return jax.tree.map(lambda all_, one: _update(all_, one, slot, 0), rows, row)


@partial(jax.jit, donate_argnames="caches")
def _put_cache(caches: Array, cache: Array, slot: Int[Array, ""]) -> Array:
    return _update(caches, cache, slot, 1)


def _update(rows: Array, row: Array, slot: Int[Array, ""], axis: int) -> Array:
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.dynamic_update_slice(rows, row, tuple(slot if i == axis else zero for i in range(rows.ndim)))
