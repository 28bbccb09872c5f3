"""`VisionConfig`: a frozen, complete description of an image encoder (a *tower*)."""

import dataclasses

from moe_jax.core.errors import InputError, check_positive, shown
from moe_jax.core.formatting import short_repr
from moe_jax.models.config import ModelConfig


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
    """

    size: int
    grid: tuple[int, int]
    channels: int = 3
    bias: bool = False
    class_token: bool = False
    pre_norm: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_positive(self, "size", "channels")
        if len(self.grid) != 2 or any(not isinstance(side, int) or not 1 <= side <= 1024 for side in self.grid):
            raise InputError(f"grid={shown(self.grid)}: expected rows and columns of patches, from 1 to 1024 each")

    @property
    def num_positions(self) -> int:
        """Number of learned positions."""
        return self.grid[0] * self.grid[1] + self.class_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """An image encoder: patches, and the layers over them.

    Attributes:
      patches: what comes before the layers.
      tower: the layers, whose attention sees all tokens and rotates none; its vocabulary and head are ignored.
      pooled_norm: there is one more norm, for the class token alone that stands for the whole picture (CLIP); it is
        kept, and features of patches do not pass it.
    """

    patches: PatchesConfig
    tower: ModelConfig
    pooled_norm: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for i, layer in enumerate(self.tower.layers):
            if layer.attention.mask != "bidirectional" or self.tower.rope_of(layer).fraction:
                raise InputError(f"layer {i} of a tower: its mask is 'bidirectional', and it rotates nothing")
        if self.tower.max_positions != self.patches.num_positions:
            raise InputError(
                f"a tower of {self.tower.max_positions} positions for {self.patches.num_positions} patches and tokens"
            )
