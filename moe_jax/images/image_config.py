"""Pictures as a model gets them: their pixels, and how these become the tokens of an image encoder."""

import dataclasses
from typing import Literal

from moe_jax.core.errors import InputError, check_member, check_positive, shown
from moe_jax.core.formatting import short_repr

RESAMPLING = ("bicubic", "bilinear", "lanczos")
_LARGEST_SIDE, _LARGEST_GRID = 4096, 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchesConfig:
    """How a picture becomes tokens: squares of it, each through one linear map, plus a learned position.

    Attributes:
      size: side p of a patch, in pixels.
      grid: rows and columns of patches that positions were learned for; of other pictures they are interpolated.
      channels: of the picture.
      bias: whether the linear map has one.
      class_token: a learned token stands before the patches, with a position of its own.
      pre_norm: tokens are normalised before the first layer (CLIP).
      pooled_norm: beside the layers there is a norm for the one vector that stands for the whole picture, the class
        token (CLIP) or what is pooled of all; it is kept, and features do not pass it.
    """

    size: int
    grid: tuple[int, int]
    channels: int = 3
    bias: bool = False
    class_token: bool = False
    pre_norm: bool = False
    pooled_norm: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_positive(self, "size", "channels")
        if len(self.grid) != 2 or any(
            not isinstance(side, int) or not 1 <= side <= _LARGEST_GRID for side in self.grid
        ):
            raise InputError(
                f"grid={shown(self.grid)}: expected rows and columns of patches, from 1 to {_LARGEST_GRID} each"
            )

    @property
    def num_positions(self) -> int:
        """Number of learned positions."""
        return self.grid[0] * self.grid[1] + self.class_token

    def grid_of(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns rows and columns of patches of a picture of this height and width, in pixels."""
        return size[0] // self.size, size[1] // self.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageProcessing:
    """How a picture becomes the pixels of a model.

    Attributes:
      size: height and width of the result, in pixels.
      shortest: the shorter side is resized to it, the longer one in proportion, and the middle is cut out; None: both
        sides are resized to `size`.
      pad: before that, the picture is put in the middle of a square of the colour `mean` (LLaVA's
        `image_aspect_ratio`).
      resample: the filter.
      rescale: what a byte is multiplied by.
      mean, std: of red, green and blue, after rescaling.
    """

    size: tuple[int, int]
    shortest: int | None = None
    pad: bool = False
    resample: Literal["bicubic", "bilinear", "lanczos"] = "bicubic"
    rescale: float = 1 / 255
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_member("resample", self.resample, RESAMPLING)
        sides = (*self.size, *(() if self.shortest is None else (self.shortest,)))
        if len(self.size) != 2 or not all(isinstance(side, int) and 1 <= side <= _LARGEST_SIDE for side in sides):
            raise InputError(f"a picture of {shown(sides)} pixels: expected sides from 1 to {_LARGEST_SIDE}")
        if len(self.mean) != 3 or len(self.std) != 3 or not all(value > 0 for value in self.std):
            raise InputError(
                f"mean={shown(self.mean)}, std={shown(self.std)}: expected three each, of which std above 0"
            )
