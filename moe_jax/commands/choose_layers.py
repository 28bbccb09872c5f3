"""`--layers top:24`, `4-11`, `0,3,5` or `all`: which MoE layers of a model are meant."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_jax.models import ModelConfig


def parse_layers(text: str, config: "ModelConfig") -> tuple[int, ...] | None:
    """Reads which layers a user means.

    Args:
      text: `all`; `top:N`, the last N MoE layers; or layers and ranges of layers, counted from 0, separated by commas.
        A range stands for the MoE layers in it.
      config: of the model.

    Returns:
      Indices in the order given; a layer named on its own need not be an MoE layer. None: all MoE layers.

    Raises:
      InputError: if it cannot be read, asks for more MoE layers than there are, or names a range without any.
    """
    from moe_jax.errors import InputError, shown

    moe = config.moe_layers
    if text == "all":
        return None
    if top := re.fullmatch(r"top:(\d{1,9})", text):
        count = int(top[1])
        if not 1 <= count <= max(1, len(moe)):
            raise InputError(f"--layers {text}: the model has {len(moe)} MoE layers")
        return moe[-count:] or None  # a model without MoE layers is refused elsewhere
    layers: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if ends is None:
            raise InputError(f"--layers {shown(text)}: expected all, top:N, or layers such as 0,3,8-11")
        if ends[2] is None:
            layers.append(int(ends[1]))
            continue
        some = [i for i in moe if int(ends[1]) <= i <= int(ends[2])]
        if not some:
            raise InputError(f"--layers {part.strip()}: none of them is an MoE layer")
        layers += some
    return tuple(layers)
