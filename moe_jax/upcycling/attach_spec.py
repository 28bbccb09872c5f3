"""The options of `attach`."""

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, ClassVar

from moe_jax.core.errors import InputError, shown
from moe_jax.core.verb_spec import Shown, TakesNonfinite

MAX_SIDE = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachSpec(TakesNonfinite):
    """The options of `attach`: the image encoder, what is taken of it, and the steps to the language model's width.

        >>> moe_jax.AttachSpec(tower="clip", features="-2,-5").taken
        (-2, -5)

    Raises:
      InputError: for options that cannot be read or are out of range.
    """

    example: ClassVar[str] = "--tower clip-vit-large-patch14-336"

    tower: Annotated[str | os.PathLike[str], Shown("DIR", read_as=Path)]
    """The image encoder: a Hugging Face directory of CLIP, SigLIP, DINOv2 or InternViT, or ORG/NAME."""
    size: Annotated[int | None, Shown("N", "as the encoder's preprocessor config says")] = None
    """Pixels of a side of the encoder's pictures. Given, pictures are padded to a square and resized to it, and the
    encoder's positions are interpolated."""
    features: Annotated[str | Collection[int], Shown("N,N,...", read_as=str)] = "-2"
    """The hidden states of the encoder that are joined: 0 is the input of its first layer, -1 the output of its last
    one. Layers after the last of them are never computed."""
    projector: Annotated[str | Collection[str], Shown("STEP,STEP,...", read_as=str)] = "linear,gelu,linear"
    """Steps from the features to the language model, drawn anew: linear, linear:unbiased, norm, an activation, pool:S
    or pixel_shuffle:S, which make one token of S x S patches."""
    pictures: Annotated[str | os.PathLike[str] | None, Shown("DIR", "none", Path | None)] = None
    """A folder of pictures like those that the model shall see, some hundreds. The projector then begins with what
    differs between them, and learns in far fewer steps what they mean."""
    placeholder: Annotated[str | None, Shown("TOKEN", "<image>, if the tokenizer has it")] = None
    """The token of the language model's tokenizer that stands for a picture in a prompt."""
    seed: int = 0
    """Seed of the projector."""

    def __post_init__(self) -> None:
        if self.size is not None and (isinstance(self.size, bool) or not 1 <= self.size <= MAX_SIDE):
            raise InputError(f"--size {shown(self.size)}: expected pixels from 1 to {MAX_SIDE}")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed {shown(self.seed)} must lie between 0 and {2**32 - 1}")
        if not self.steps:
            raise InputError("--projector names no step; expected some, such as linear,gelu,linear")
        if not self.taken:
            raise InputError("--features names no hidden state; expected some, such as -2")

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps of `projector`."""
        given = self.projector
        return tuple(given.split(",") if isinstance(given, str) and given else given)

    @property
    def taken(self) -> tuple[int, ...]:
        """The numbers of `features`."""
        given = self.features
        try:
            return tuple(int(one) for one in (given.split(",") if isinstance(given, str) and given else given))
        except ValueError:
            raise InputError(
                f"--features {shown(given)}: expected numbers of hidden states, such as -2 or 3,-2"
            ) from None

    def described(self) -> dict[str, Any]:
        """Returns the options as they are written to the lineage."""
        return {
            "tower": os.fspath(self.tower),
            "size": self.size,
            "features": list(self.taken),
            "projector": list(self.steps),
            "pictures": None if self.pictures is None else os.fspath(self.pictures),
            "placeholder": self.placeholder,
            "seed": self.seed,
        }
