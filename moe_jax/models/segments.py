"""Segments: runs of layers that repeat, so that they can be stacked and scanned.

A model is a list of segments; a segment is a pattern of layers (say FFN, MoE) repeated
n times. Compile time then grows with the number of distinct patterns, not with depth.
"""

from typing import NamedTuple

from moe_jax.models.config import LayerConfig

MAX_PATTERN = 8


class Segment(NamedTuple):
    """`pattern` repeated `repeats` times, beginning at layer `start`."""

    start: int
    pattern: tuple[LayerConfig, ...]
    repeats: int

    def layer(self, repeat: int, position: int) -> int:
        """Returns the index in the model of the layer at `position` of the pattern, in the given repeat."""
        return self.start + repeat * len(self.pattern) + position


def segments_of(layers: tuple[LayerConfig, ...]) -> tuple[Segment, ...]:
    """Divides the layers into segments, greedily: the repetition that covers most layers, short patterns first.

    Args:
      layers: the layers of a model, in order.

    Returns:
      Segments that cover the layers exactly once and in order. None crosses the boundary between an encoder's and a
      decoder's layers, which are never equal.
    """
    segments = []
    start = 0
    while start < len(layers):
        best = Segment(start, layers[start : start + 1], 1)
        for width in range(1, MAX_PATTERN + 1):
            pattern = layers[start : start + width]
            repeats = 1
            while layers[start + repeats * width : start + (repeats + 1) * width] == pattern:
                repeats += 1
            # A pattern that occurs once is not a repetition; choosing it could hide a longer run behind it.
            if repeats > 1 and repeats * width > best.repeats * len(best.pattern):
                best = Segment(start, pattern, repeats)
        segments.append(best)
        start += best.repeats * len(best.pattern)
    return tuple(segments)


def single_layers(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Returns the same layers in segments of one repeat each, for a program that does not scan over layers."""
    return tuple(
        Segment(segment.layer(repeat, 0), segment.pattern, 1)
        for segment in segments
        for repeat in range(segment.repeats)
    )
