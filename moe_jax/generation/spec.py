"""The options of `generate`."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from jaxtyping import UInt8

from moe_jax.core.errors import MAX_SIZE, InputError, check_positive, is_finite, shown
from moe_jax.core.verb_spec import Shown, Spec

Picture = str | os.PathLike[str] | UInt8[np.ndarray, "H W 3"]
"""The path of a picture, or its pixels: red, green and blue."""
Images = Picture | Sequence[Picture]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateSpec(Spec):
    """The options of `generate`: which tokens are taken, and when a text ends.

    >>> spec = moe_jax.GenerateSpec(max_new_tokens=8, stop=".")
    >>> spec.temperature, spec.seed
    (0.0, 0)

    Raises:
      InputError: for numbers that are out of range, or a stop string that is none.
    """

    max_new_tokens: int = 128
    """The largest number of tokens to add."""
    temperature: Annotated[float, Shown("X", "0.0")] = 0.0
    """Divides the logits before sampling; 0 takes the most likely token."""
    top_k: int | None = None
    """Samples from this many of the most likely tokens; by default from all."""
    top_p: float | None = None
    """Samples from the most likely tokens whose probabilities sum to this; by default from all."""
    seed: int = 0
    """Seed of the sampling."""
    stop: Annotated[str | Sequence[str], Shown("TEXT", read_as=tuple[str, ...], repeats=True)] = ()
    """A text that ends what is generated, and is no part of it; may be given several times."""
    stop_ids: Annotated[Sequence[int], Shown("N ...", read_as=tuple[int, ...])] = ()
    """Tokens that end a text, besides those that the model names as EOS, in its config or in the files beside it; by
    default no others."""
    image: Annotated[Images, Shown("FILE", read_as=tuple[Path, ...], repeats=True)] = ()
    """A picture (PNG, JPEG, WebP, GIF, BMP or TIFF) for a model that sees; may be given several times. The prompts hold
    a placeholder for each, <image>, and take them in order."""

    def __post_init__(self) -> None:
        if not isinstance(self.stop, Sequence) or not all(isinstance(one, str) and one for one in self.stops):
            raise InputError("a stop string must be a text of at least one character")
        check_positive(self, "max_new_tokens", "top_k")
        if not (is_finite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature={shown(self.temperature)} must be 0 (greedy) or above")
        if self.top_p is not None and not (is_finite(self.top_p) and 0 < self.top_p <= 1):
            raise InputError(f"top_p={shown(self.top_p)} must lie in (0, 1], or be left out")
        if not _is_integer(self.seed, -(1 << 63), (1 << 63) - 1):
            raise InputError(f"seed={shown(self.seed)} must be an integer of 64 bits")
        if not isinstance(self.stop_ids, Sequence) or not all(_is_integer(one, 0, MAX_SIZE) for one in self.stop_ids):
            raise InputError(f"stop_ids={shown(self.stop_ids)} must be a list of token ids")

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def images(self) -> tuple[Picture, ...]:
        """The pictures, in the order of their placeholders."""
        given: Any = self.image
        if isinstance(given, np.ndarray) and given.ndim != 3:
            return tuple(given)
        if isinstance(given, Sequence) and not isinstance(given, str):
            return tuple(given)
        return (cast(Picture, given),)  # what is no picture either is refused where it is read


def _is_integer(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and least <= int(value) <= most
