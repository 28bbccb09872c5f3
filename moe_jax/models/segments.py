"""Segments: layers of a model that repeat, which a program scans over."""

import itertools
from collections.abc import Collection
from typing import NamedTuple

from moe_jax.models.layer_config import LayerConfig

MAX_PATTERN = 8


class Segment(NamedTuple):
    """`pattern` repeated `repeats` times, beginning at layer `start`."""

    start: int
    pattern: tuple[LayerConfig, ...]
    repeats: int

    def layer(self, repeat: int, position: int) -> int:
        """Returns the index in the model of the layer at `position` of the pattern, in the given repeat."""
        return self.start + repeat * len(self.pattern) + position


def segments_of(layers: tuple[LayerConfig, ...], *, cuts: Collection[int] = ()) -> tuple[Segment, ...]:
    """Divides the layers into segments, greedily: the repetition that covers most layers, short patterns first.

    Args:
      layers: the layers of a model, in order.
      cuts: layers at which a segment begins, whatever stands before and behind.

    Returns:
      Segments that cover the layers exactly once and in order. None crosses the boundary between an encoder's and a
      decoder's layers, which are never equal.
    """
    edges = sorted({0, *cuts, len(layers)})
    if len(edges) > 2:
        parts = [(first, segments_of(layers[first:end])) for first, end in itertools.pairwise(edges)]
        return tuple(one._replace(start=first + one.start) for first, part in parts for one in part)
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


# A screen holds about so many.
_MOST_SHOWN = 8


def show_layers(layers: tuple[LayerConfig, ...]) -> str:
    """Returns the layers in Python: `(LayerConfig(...),) * 32`; of many that differ, the first."""
    parts, room = [], _MOST_SHOWN
    for segment in segments_of(layers):
        if len(segment.pattern) > room:
            return " + ".join([*parts, f"... of {len(layers)} layers"])
        room -= len(segment.pattern)
        pattern = f"({', '.join(map(repr, segment.pattern))}{',' * (len(segment.pattern) == 1)})"
        parts.append(pattern if segment.repeats == 1 else f"{pattern} * {segment.repeats}")
    return " + ".join(parts)


def single_layers(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Returns the same layers in segments of one repeat each, for a program that does not scan over layers."""
    return tuple(
        Segment(segment.layer(repeat, 0), segment.pattern, 1)
        for segment in segments
        for repeat in range(segment.repeats)
    )
