"""Layers that differ only in how their kernels are stored, as repeats of one, for a loop over them."""

import dataclasses
from typing import Any

from flax import nnx

from moe_jax.distributed.sharding import mesh_of
from moe_jax.experts.arrangements.unlike_layers import joining, stand_in
from moe_jax.experts.devices import current_chip
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig
from moe_jax.models.segments import Segment, segments_of
from moe_jax.nn import Decoder, MoE, unstacked
from moe_jax.nn.block_stack import BlockStack


def alike_segments(config: ModelConfig) -> tuple[Segment, ...] | None:
    """Returns the segments that the layers have when only their kernels differ; None: the model has no fewer."""
    if config.has_encoder:
        return None
    segments = segments_of(tuple(map(_without_codes, config.layers)))
    return segments if len(segments) < len(segments_of(config.layers)) else None


def has_layers_of_config(model: Decoder) -> bool:
    """Whether the layers of a decoder are what its config says, but for banks; a user may have replaced some."""
    layers, segments = model.config.layers, list(model.stack.segments)
    found = [(segment.start, len(segment.blocks), segment.repeats) for segment in segments]
    expected = [(segment.start, len(segment.pattern), segment.repeats) for segment in segments_of(layers)]
    if found != expected and found != [(layer, 1, 1) for layer in range(len(layers))]:
        return False
    blocks = [(segment.start + place, block) for segment in segments for place, block in enumerate(segment.blocks)]
    return all(_has_config(block, layers[layer]) for layer, block in blocks)


def _has_config(block: Any, layer: LayerConfig) -> bool:
    mlp, config = getattr(block, "mlp", None), layer.mlp
    if not isinstance(mlp, MoE) or not isinstance(config, MoEConfig):
        return not isinstance(mlp, MoE) and not isinstance(config, MoEConfig)
    return dataclasses.replace(mlp.config, bank=config.bank) == config


def join_alike_layers(model: Decoder) -> bool:
    """Changes in place a model on one CPU: its layers that are alike are stacked, whatever their kernels' forms.

    The config of its layers says from then on what they have in common.

    Args:
      model: which `has_layers_of_config`.

    Returns:
      Whether it was done: not on other devices, or if there are no such layers, or kernels with too many forms, or
      layers that differ in more than these.
    """
    segments, mesh = alike_segments(model.config), mesh_of(nnx.state(model))
    if segments is None or current_chip().platform != "cpu" or (mesh is not None and mesh.size > 1):
        return False
    # Other modules with the same variables: a model that is not joined keeps its configs.
    blocks: list[Any] = [
        nnx.merge(*nnx.split(block)) for single in unstacked(model).stack.segments for block in single.blocks
    ]
    every = [
        [blocks[segment.layer(repeat, place)] for repeat in range(segment.repeats)]
        for segment in segments
        for place in range(len(segment.pattern))
    ]
    layers = [layer for segment in segments for layer in segment.pattern * segment.repeats]
    for block, layer in zip(blocks, layers, strict=True):
        if isinstance(getattr(block, "mlp", None), MoE):
            block.mlp.config = layer.mlp
    joins = [joining(own) for own in every]
    if None in joins:
        return False
    made: list[Any] = [join() for join in joins if join is not None]
    for block in made:
        if isinstance(getattr(block, "mlp", None), MoE):  # so that it is described as what it is
            block.mlp.config = dataclasses.replace(block.mlp.config, bank=block.mlp.experts.config)
    joined = iter(made)
    model.stack.segments = nnx.List(
        [BlockStack(start, repeats, [next(joined) for _ in pattern]) for start, pattern, repeats in segments]
    )
    for part in (model, model.stack):
        part.config = dataclasses.replace(part.config, layers=tuple(layers))
    return True


def _without_codes(layer: LayerConfig) -> LayerConfig:
    mlp = layer.mlp
    if isinstance(mlp, MoEConfig):
        mlp = dataclasses.replace(mlp, bank=stand_in(mlp.bank))
    return dataclasses.replace(layer, codes=(), mlp=mlp)
