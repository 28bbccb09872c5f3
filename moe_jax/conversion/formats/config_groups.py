"""The groups of a compressed-tensors config: how the weights of some modules are stored."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_jax.conversion.formats.quantized_format import QuantizationKeys, name_pattern
from moe_jax.core.errors import InputError, shown

DENSE = (None, "dense", "fakequant")
"""Formats in which a matrix is stored as it is; its scales, if there are any, are for whoever rounds it."""

_FORMATS = (
    *DENSE[1:],
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
_STRATEGIES = (None, "tensor", "channel", "group", "tensor_group", "block")
_OFFLINE = ("weight_input", "weight_output")  # rotations that the stored weights already have


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigGroup:
    """How the weights of some modules are stored.

    Attributes:
      names: of modules, or of their classes.
      patterns: that match the names of modules from their beginning on.
      kind: `int` or `float`.
      bits: of a code.
      is_symmetric: whether there are no zero points.
      block: rows and columns that share a scale; None: a row has one, or all have.
      format: name of the format, one that is read; None: none is given.
    """

    names: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]
    kind: str
    bits: int
    is_symmetric: bool
    block: tuple[int, int] | None
    format: str | None

    @property
    def stored(self) -> tuple[Any, ...]:
        """All that decides how its weights are stored: groups that are equal in it are alike."""
        return self.kind, self.bits, self.is_symmetric, self.block, self.format in DENSE

    def matches(self, module: str, *, by_class: bool) -> bool:
        """Whether it is for a module of this name, as a target says that is a name or, else, a class.

        Of the classes, only the two are known that are stored in codes.
        """
        if by_class:
            return ("Embedding" if module.rpartition(".")[2].startswith("embed") else "Linear") in self.names
        return module in self.names or any(pattern.match(module) for pattern in self.patterns)


def group_for(module: str, groups: Iterable[ConfigGroup]) -> ConfigGroup | None:
    """Returns the group of those given that a module is in; None: the config does not say it.

    Names come before classes. A checkpoint may name its modules otherwise than the config, so where all groups are
    alike it is no matter which.
    """
    groups = list(groups)
    if len({group.stored for group in groups}) == 1:
        return groups[0]
    found = (group for by_class in (False, True) for group in groups if group.matches(module, by_class=by_class))
    return next(found, None)


def read_groups(keys: QuantizationKeys) -> tuple[ConfigGroup, ...]:
    """Returns the groups of a config whose weights are quantised.

    Raises:
      InputError: if its weights are sparse, or rotated together with activations, or it is none that this library
        reads.
    """
    _check_others(keys)
    default = format_in(keys)
    if keys.data.get("config_groups") is None:
        return ()
    found = keys.inside("config_groups")
    return tuple(
        _read_group(found.inside(name), default)
        for name, group in found.data.items()
        if not isinstance(group, Mapping) or group.get("weights") is not None
    )


def format_in(keys: QuantizationKeys) -> str | None:
    """Returns the name of a format under `format`, one that is read; None: none is given."""
    return None if keys.data.get("format") is None else keys.choice("format", _FORMATS)


def _check_others(keys: QuantizationKeys) -> None:
    sparsity = keys.data.get("sparsity_config")
    name = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if name not in DENSE:
        raise InputError(
            f"{keys.where}: 'sparsity_config' has the format {shown(name)}, expected 'dense': matrices "
            "without their zeros are not read; convert the checkpoint that this one was made of"
        )
    rotations = keys.data.get("transform_config") or {}
    if not isinstance(rotations, Mapping):
        raise InputError(f"{keys.where}: 'transform_config' is {shown(rotations)}, expected an object")
    for location in _locations(rotations.get("config_groups")):
        if location not in _OFFLINE:
            raise InputError(
                f"{keys.where}: 'transform_config' rotates at {shown(location)}, expected "
                f"{' or '.join(_OFFLINE)}: models that rotate activations are not read"
            )


def _locations(groups: Any) -> list[Any]:
    """Returns where rotations apply; something malformed is its own location, and none that is known."""
    if not groups:
        return []
    if not isinstance(groups, Mapping):
        return [groups]
    applied = [group.get("apply", ()) if isinstance(group, Mapping) else group for group in groups.values()]
    places = [place for one in applied for place in (one if isinstance(one, Sequence) else [one])]
    return [place.get("location") if isinstance(place, Mapping) else place for place in places]


def _read_group(keys: QuantizationKeys, default: str | None) -> ConfigGroup:
    weights, targets = keys.inside("weights"), keys.data.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise InputError(f"{keys.where}: 'targets' is {shown(targets)}, expected a list of names")
    kind = weights.choice("type", ("int", "float"), default="int")
    return ConfigGroup(
        names=tuple(target for target in targets if not target.startswith("re:")),
        patterns=tuple(
            name_pattern(target.removeprefix("re:"), f"{keys.where}: 'targets'")
            for target in targets
            if target.startswith("re:")
        ),
        kind=kind,
        bits=weights.choice("num_bits", range(1, 9) if kind == "int" else (4, 8), default=8),
        is_symmetric=weights.choice("symmetric", (True, False), default=True),
        block=_block(weights),
        format=format_in(keys) or default,
    )


def _block(weights: QuantizationKeys) -> tuple[int, int] | None:
    strategy = weights.choice("strategy", _STRATEGIES)
    size, block = weights.group_size(), weights.block_size("block_structure")
    if strategy == "block":
        if block is None:
            raise InputError(f"{weights.where}: 'block_structure' is missing, expected two sizes of a block")
        return block
    if strategy in ("group", "tensor_group") and size is None:
        raise InputError(f"{weights.where}: 'group_size' is missing, expected a size of groups")
    return None if size is None or strategy in ("tensor", "channel") else (1, size)
