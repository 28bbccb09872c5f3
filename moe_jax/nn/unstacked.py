"""A model in which every layer has arrays of its own, for generation.

A scan over stacked layers copies every layer's parameters and caches out of the stack on each turn. In training this is
negligible beside the work on many tokens. For a single generated token it is as much as the work itself, and it copies
all experts where few are used. So generation runs a program that loops over no layers.
"""

import jax
from flax import nnx

from moe_jax.nn.decoder import Decoder
from moe_jax.nn.stack import BlockStack, Stack


def unstacked(model: Decoder) -> Decoder:
    """Returns the same model in segments of one repeat; the model itself if it has no others.

    While both models live, they take the memory of the layers twice.
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
    """Slices stacked parameters into parts [1, ...], one per repeat, split over devices as the stacks are."""
    if all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        # One tree for each: NNX takes variables that are the same object for tied ones.
        one = lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype)  # noqa: E731
        return [jax.tree.map(one, state) for _ in range(repeats)]
    return _cut(state, repeats)


@jax.jit(static_argnums=1)
def _cut(state: nnx.State, repeats: int) -> list[nnx.State]:
    return [jax.tree.map(lambda leaf, at=at: leaf[at : at + 1], state) for at in range(repeats)]
