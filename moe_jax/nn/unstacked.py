"""A model whose layers lie in arrays of their own.

A scan over stacked layers copies every layer's parameters and caches out of the stack for each of its turns. In
training that is nothing beside the work on many tokens. For a token that is generated it is as much as the work itself,
and of experts it would be all where few are used. So generation runs a program in which no layer is looped over.
"""

import jax
from flax import nnx

from moe_jax.nn.decoder import Decoder
from moe_jax.nn.stack import BlockStack, Stack


def unstacked(model: Decoder) -> Decoder:
    """The same model in segments of one repeat; the model itself if it has no others.

    Takes as much memory as the layers for as long as the two models live.
    """
    if not is_stacked(model):
        return model
    graphdef, state = nnx.split(model)
    copy = nnx.merge(graphdef, state)
    for stack in _stacks(copy):
        stack.segments = nnx.List([single for segment in stack.segments for single in _single_layers(segment)])
    return copy


def is_stacked(model: Decoder) -> bool:
    """Whether any layers of the model are stacked."""
    return any(segment.repeats > 1 for stack in _stacks(model) for segment in stack.segments)


def _stacks(model: Decoder) -> list[Stack]:
    return [model.stack, *([model.encoder] if model.config.has_encoder else [])]


def _single_layers(segment: BlockStack) -> list[BlockStack]:
    graphdef, state = nnx.split(segment.blocks)
    parts = _parts(state, segment.repeats)
    return [
        BlockStack(segment.start + repeat * len(segment.blocks), 1, nnx.merge(graphdef, part))
        for repeat, part in enumerate(parts)
    ]


def _parts(state: nnx.State, repeats: int) -> list[nnx.State]:
    """Slices [1, ...] of stacked parameters, one per repeat, split over devices as these are."""
    if all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        # A tree for each: NNX takes variables that are the same object for tied ones.
        one = lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype)  # noqa: E731
        return [jax.tree.map(one, state) for _ in range(repeats)]
    return _cut(state, repeats)


@jax.jit(static_argnums=1)
def _cut(state: nnx.State, repeats: int) -> list[nnx.State]:
    return [jax.tree.map(lambda leaf, at=at: leaf[at : at + 1], state) for at in range(repeats)]
