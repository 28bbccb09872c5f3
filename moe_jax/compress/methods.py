"""What a method of compression is, and the table of those there are. Nothing else knows a method by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from moe_jax.compress.base import Base
from moe_jax.compress.deltas import Write
from moe_jax.compress.figures import LayerFigures
from moe_jax.compress.quantize import Quantize
from moe_jax.compress.source_layer import SourceLayer
from moe_jax.compress.sparsify import Sparsify
from moe_jax.errors import InputError, check_member
from moe_jax.models import MoEConfig


class Method(Protocol):
    """A frozen dataclass: its fields are its options, and also the command's.

    Attributes:
      swept: name of the option that says how much is kept, and the values that a sweep tries.
    """

    swept: ClassVar[tuple[str, tuple[Any, ...]]]

    def plan(self, layers: Sequence[SourceLayer]) -> dict[int, MoEConfig]:
        """What the layers to compress become, by index: from their configs alone, before a weight is read."""
        ...

    def compress(self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write) -> LayerFigures:
        """Makes the leaves of one layer.

        Args:
          layer: its experts as they are.
          base: what deltas may be taken from.
          target: what `plan` said the layer becomes.
          write: takes leaves by their paths below `mlp`. What is not given to it stays as it is.

        Raises:
          InputError: if weights are not finite.
        """
        ...


METHODS: dict[str, type[Method]] = {"ders-sparsify": Sparsify, "ders-quantize": Quantize}


def option_names(method: str) -> tuple[str, ...]:
    """Options that a method takes."""
    return tuple(field.name for field in dataclasses.fields(METHODS[method]))


def make_method(name: str, options: Mapping[str, Any]) -> Method:
    """Makes a method from what the user gave.

    Args:
      name: a key of `METHODS`.
      options: by name; only those that were given.

    Raises:
      InputError: for an unknown method, an option of another one, one that is missing, or a value out of range.
    """
    check_member("method", name, tuple(METHODS))
    known = option_names(name)
    for option in options:
        if option not in known:
            others = [method for method in METHODS if option in option_names(method)]
            raise InputError(f"{_flag(option)} does not go with {name}: it belongs to {', '.join(others)}")
    for field in dataclasses.fields(METHODS[name]):
        if field.default is dataclasses.MISSING and field.name not in options:
            raise InputError(f"{name} needs {_flag(field.name)}")
    return METHODS[name](**options)


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
