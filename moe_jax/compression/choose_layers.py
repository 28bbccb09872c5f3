"""`--layers top:24`, `4-11`, `0,3,5`, `encoder:0,2,decoder:top:2` or `all`: which MoE layers of a model are meant."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_jax.models import ModelConfig


def parse_layers(text: str, config: "ModelConfig") -> tuple[int, ...] | None:
    """Reads which layers a user means.

    Args:
      text: `all`; `top:N`, the last N MoE layers; or layers and ranges of layers, counted from 0, separated by commas.
        A range stands for the MoE layers in it. Of a model with an encoder, layers are counted through both stacks; or
        in each of them, if any of these stands after `encoder:` or `decoder:`.
      config: of the model.

    Returns:
      Indices in the order given; a layer named on its own need not be an MoE layer. None: all MoE layers.

    Raises:
      InputError: if it cannot be read, asks for more MoE layers than there are, or names a range without any, or a
        stack that the model does not have.
    """
    from moe_jax.core.errors import InputError

    if text == "all":
        return None
    if not re.match(r"(encoder|decoder):", text):
        return _parse(text, config.moe_layers, "the model")
    if not config.has_encoder:
        raise InputError(f"--layers {text}: the model has no encoder; name its layers without a stack")
    first, found = config.num_encoder_layers, []
    for part in re.split(r",(?=(?:encoder|decoder):)", text):
        stack, _, rest = part.partition(":")
        layers = range(first) if stack == "encoder" else range(first, config.num_layers)
        moe = [layers.index(i) for i in config.moe_layers if i in layers]
        chosen = moe if rest == "all" else _parse(rest, moe, f"the {stack}")
        if not chosen:
            raise InputError(f"--layers {part}: the {stack} has no MoE layers")
        outside = [i for i in chosen if i >= len(layers)]
        if outside:
            raise InputError(f"--layers {part}: the {stack} has layers 0 to {len(layers) - 1}, and no {outside[0]}")
        found += [layers[i] for i in chosen]
    return tuple(found)


def _parse(text: str, moe: "tuple[int, ...] | list[int]", where: str) -> tuple[int, ...] | None:
    """Reads the layers of one stack; `moe` are its MoE layers, counted within the stack."""
    from moe_jax.core.errors import InputError, shown

    if top := re.fullmatch(r"top:(\d{1,9})", text):
        count = int(top[1])
        if not 1 <= count <= max(1, len(moe)):
            raise InputError(f"--layers {text}: {where} has {len(moe)} MoE layers")
        return tuple(moe[-count:]) or None  # a model without MoE layers is refused elsewhere
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if ends is None:
            raise InputError(f"--layers {shown(text)}: expected all, top:N, or layers such as 0,3,8-11")
        if ends[2] is None:
            found.append(int(ends[1]))
            continue
        some = [i for i in moe if int(ends[1]) <= i <= int(ends[2])]
        if not some:
            raise InputError(f"--layers {part.strip()}: none of them is an MoE layer")
        found += some
    return tuple(found)
