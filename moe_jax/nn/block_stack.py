"""Layers that repeat: stacked, and applied in one loop."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.core.errors import InputError
from moe_jax.experts.linear import OfAllLayers
from moe_jax.experts.summaries import Summarised, size_of
from moe_jax.functional import keys
from moe_jax.functional.routing.router_stats import RouterStats
from moe_jax.kernels.by_platform import PRODUCT
from moe_jax.nn.block import Block
from moe_jax.nn.context import Cache, Context, FixedContext
from moe_jax.nn.inputs import is_traced
from moe_jax.nn.inside import NOTHING_INSIDE, AtRouter, ChangeLogits, Inside, Kept, TokenRouting, by_layer, change_at
from moe_jax.nn.layer_words import layer_lines
from moe_jax.nn.sown import put_sown, take_sown

# What is saved for the backward pass: only the input of a repeat, or also every product with a kernel.
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, jax.checkpoint_policies.save_only_these_names(PRODUCT)
    ),
}


_Changes = tuple[tuple[int, ChangeLogits], ...]


class Asked(NamedTuple):
    """The static part of a call: which layers of a pattern it looks into, by their places.

    Attributes:
      inputs: places of layers whose inputs are returned.
      changes: places, and for each, the layers at it whose logits are changed, with the functions.
    """

    inputs: tuple[int, ...]
    changes: tuple[tuple[int, _Changes], ...]


class _Found(NamedTuple):
    """Results of a pattern of blocks beside the activations; over its repeats, all arrays are stacked."""

    caches: tuple[Cache, ...] | None
    stats: tuple[RouterStats, ...]
    routing: dict[int, TokenRouting]
    inputs: dict[int, Array]
    sown: Any


class BlockStack(Summarised):
    """A segment: every parameter of its pattern of blocks carries a leading axis [repeats].

    Attributes:
      start: index in the stack of the first layer.
      repeats: number of repeats of the pattern.
      blocks: one per layer of the pattern.
    """

    def __init__(self, start: int, repeats: int, blocks: Iterable[Block]):
        self.start = start
        self.repeats = repeats
        self.blocks = nnx.List(blocks)

    def _summary(self) -> list[str]:
        words = f"a pattern of {len(self.blocks)}, {self.repeats} times, {size_of(self)}"
        return [words, *layer_lines([self])]

    def layer(self, repeat: int, position: int) -> int:
        """Returns the index in the stack of the layer at a place in the pattern, in a repeat of it."""
        return self.start + repeat * len(self.blocks) + position

    def __call__(
        self,
        x: Float[Array, "B T d"],
        context: Context,
        caches: tuple[Cache, ...] | None,
        remat: str,
        key: Array | None = None,
        inside: Inside = NOTHING_INSIDE,
    ) -> tuple[Float[Array, "B T d"], tuple[Cache, ...] | None, tuple[RouterStats, ...], Kept]:
        """Applies the pattern `repeats` times.

        Args:
          x: activations.
          context: of the forward pass.
          caches: one per block of the pattern, arrays stacked over the repeats, or None.
          remat: `none`, or a key of `REMAT_POLICIES`: what is saved for the backward pass.
          key: random key of the forward pass in training; None: deterministic.
          inside: what is asked of single layers. Where the input of one is kept, so are in the program those of all
            layers that are stacked with it.

        Returns:
          Activations, caches, stacked statistics of every router of every position, and what was asked to be kept.
        """
        for position, block in enumerate(self.blocks if caches is not None else ()):
            if not getattr(block, "continues_rows", True):
                name, at = type(block).__name__, self.layer(0, position)
                raise InputError(
                    f"layer {at} is a {name}, which cannot continue rows: compute whole rows, without caches"
                )
        # One by one: Flax cannot split a list of modules while `nnx.capture` looks at them.
        graphdefs, of_all, params = zip(*(nnx.split(block, OfAllLayers, ...) for block in self.blocks), strict=True)
        arrays, fixed = context.split()
        asked = Asked(self._positions(inside.hidden_states), self._changes_by_position(inside.changes))
        biases = self._by_position(inside.biases)
        # A function may depend on anything: a program that was compiled with it would keep its first values.
        with_functions = bool(inside.changes) or _hold_functions(self.blocks)
        if caches is not None and self.repeats == 1:
            # Without a loop: caches would be copied into and out of a loop of one turn.
            first = jax.tree.map(lambda array: array[0], (params, caches, biases))
            one = first[0], first[1], jnp.int32(self.start), first[2]
            given = graphdefs, fixed, asked, x, one, of_all, arrays, key
            x, found = _apply_first(*given) if with_functions else _apply_once(_methods(self.blocks), *given)
            found = jax.tree.map(lambda array: array[None], found)
            if found.caches is not None and not context.fills_cross:
                pairs = zip(found.caches, caches, strict=True)
                found = found._replace(caches=tuple(new._replace(cross=old.cross) for new, old in pairs))
        else:
            first_layers = self.start + len(self.blocks) * jnp.arange(self.repeats, dtype=jnp.int32)
            each = params, caches, first_layers, biases
            given = graphdefs, fixed, asked, remat, x, each, of_all, arrays, key
            if with_functions or any(map(is_traced, jax.tree.leaves(given[4:]))):
                x, found = _apply_repeats(*given)
            else:
                x, found = _apply_repeats_alone(_methods(self.blocks), *given)
        put_sown(self.blocks, found.sown)
        routing, inputs = (by_layer(one, self.layer, self.repeats) for one in (found.routing, found.inputs))
        kept = Kept(routing, {layer: x for layer, x in inputs.items() if layer in inside.hidden_states})
        return x, found.caches, found.stats, kept

    def _by_position(self, biases: Mapping[int, Array]) -> dict[int, Float[Array, "R E"]]:
        """Returns biases by place in the pattern, over the repeats; zeros for layers without one."""
        found: dict[int, Array] = {}
        for position in self._positions(frozenset(biases)):
            layers = [self.layer(repeat, position) for repeat in range(self.repeats)]
            one = next(biases[layer] for layer in layers if layer in biases)
            found[position] = jnp.stack([biases.get(layer, jnp.zeros_like(one)) for layer in layers])
        return found

    def _positions(self, layers: frozenset[int]) -> tuple[int, ...]:
        """Returns the places in the pattern of some of the layers."""
        number = len(self.blocks)
        of_segment = range(self.start, self.start + self.repeats * number)
        return tuple(sorted({(layer - self.start) % number for layer in layers if layer in of_segment}))

    def _changes_by_position(self, changes: Mapping[int, ChangeLogits]) -> tuple[tuple[int, _Changes], ...]:
        """Returns the changes of logits of this segment's layers, by place in the pattern."""
        found = []
        for position in self._positions(frozenset(changes)):
            layers = (self.layer(repeat, position) for repeat in range(self.repeats))
            found.append((position, tuple((layer, changes[layer]) for layer in layers if layer in changes)))
        return tuple(found)


def _apply_repeats(
    graphdefs: tuple[nnx.GraphDef, ...],
    fixed: FixedContext,
    asked: Asked,
    remat: str,
    x: Array,
    scanned: tuple,
    of_all: tuple[nnx.State, ...],
    arrays: Any,
    key: Array | None,
) -> tuple[Array, _Found]:
    """Applies a pattern again and again; `scanned` is what `_apply_pattern` is given once, stacked over the repeats.

    `of_all` are the `OfAllLayers` of the blocks.
    """
    context = Context.joined(arrays, fixed)
    params, caches, first_layers, biases = scanned

    def repeat(carry: tuple, given: tuple) -> tuple[tuple, _Found]:
        (x, caches), (params, turn, first_layer, biases) = carry, given
        of_turn = context
        if context.slots is not None:
            of_turn = context._replace(slots=context.slots._replace(layer=turn))
        given = params, caches, first_layer, biases
        x, found = _apply_pattern(graphdefs, x, given, of_all, of_turn, key, asked)
        return (x, found.caches), found._replace(caches=None)

    if remat != "none":
        # Inside scan the loop itself keeps the compiler from merging the two forward passes.
        repeat = jax.checkpoint(repeat, policy=REMAT_POLICIES[remat], prevent_cse=False)
    # The caches of all layers go through the loop whole: handed to each turn in parts, they would be copied.
    turns = jnp.arange(len(first_layers), dtype=jnp.int32)
    (x, caches), found = jax.lax.scan(repeat, (x, caches), (params, turns, first_layers, biases))
    return x, found._replace(caches=caches)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _apply_repeats_alone(methods: tuple[Any, ...], *given: Any) -> tuple[Array, _Found]:
    """Does the same as a program of its own, outside of any other: it is compiled once for each shape.

    `methods` are those of the modules: patched, as is done to look into them, they are other modules.
    """
    return _apply_repeats(*given)


def _apply_pattern(
    graphdefs: tuple[nnx.GraphDef, ...],
    x: Array,
    given: tuple,
    of_all: tuple[nnx.State, ...],
    context: Context,
    key: Array | None,
    asked: Asked,
) -> tuple[Array, _Found]:
    """Applies blocks in order; `given` are their parameters, their caches, the index of the first block, and biases.

    In a loop, the caches are those of all its turns (`Slots.layer`).
    """
    params, caches, first_layer, biases = given
    changes = dict(asked.changes)
    new_caches, stats, routings, inputs = [], [], {}, {}
    blocks = [nnx.merge(*parts) for parts in zip(graphdefs, of_all, params, strict=True)]
    for position, block in enumerate(blocks):
        layer = first_layer + position
        if position in asked.inputs:
            inputs[position] = x
        cache = None if caches is None else caches[position]
        kept: list[TokenRouting] | None = [] if context.keeps_routing else None
        at_router = AtRouter(biases.get(position), change_at(changes.get(position, ()), layer), kept)
        x, cache, router = block(x, context._replace(at_router=at_router), cache, keys.fold_in(key, layer))
        if kept:
            routings[position] = kept[-1]
        new_caches.append(cache)
        stats.extend(router)
    new = None if caches is None else tuple(new_caches)
    return x, _Found(new, tuple(stats), routings, inputs, take_sown(blocks))


def _apply_first(
    graphdefs: tuple[nnx.GraphDef, ...],
    fixed: FixedContext,
    asked: Asked,
    x: Array,
    given: tuple,
    of_all: tuple[nnx.State, ...],
    arrays: Any,
    key: Array | None,
) -> tuple[Array, _Found]:
    """Applies a pattern once; `given` is for `_apply_pattern`."""
    context = Context.joined(arrays, fixed)
    x, found = _apply_pattern(graphdefs, x, given, of_all, context, key, asked)
    if found.caches is not None and not context.fills_cross:
        # What is in the caches of cross-attention already must not be copied for every token.
        found = found._replace(caches=tuple(cache._replace(cross=None) for cache in found.caches))
    return x, found


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _apply_once(methods: tuple[Any, ...], *given: Any) -> tuple[Array, _Found]:
    """Does the same as a program of its own: equal layers that are not stacked are traced only once."""
    return _apply_first(*given)


def _methods(blocks: Iterable[nnx.Module]) -> tuple[Any, ...]:
    """Returns the methods of all modules below some blocks, by class; of Flax's own classes none."""
    kinds = {type(module) for block in blocks for _, module in nnx.iter_modules(block)}
    bases = {base for kind in kinds for base in kind.__mro__ if not base.__module__.startswith(("flax.", "builtins"))}
    ordered = sorted(bases, key=lambda base: (base.__module__, base.__qualname__))
    return tuple(method for base in ordered for method in vars(base).values() if callable(method))


def _hold_functions(blocks: Iterable[nnx.Module]) -> bool:
    """Whether a function stands in the place of a module below some blocks, such as a router."""
    modules = (module for block in blocks for _, module in nnx.iter_modules(block))
    held = (value for module in modules for value in vars(module).values())
    return any(callable(value) and not isinstance(value, nnx.Module | nnx.Variable | type) for value in held)
