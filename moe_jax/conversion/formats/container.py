"""The interface of a format in which parts of a model are written in codes: the numbers that it has, and how it says
which matrices are in them."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from moe_jax.conversion.formats.encoders import Encoder, Quantise, WholeNumbers
from moe_jax.experts.forms.coding import WholeNumberCodes


class OwnCodes(NamedTuple):
    """The codes that all experts of a model have.

    Attributes:
      codes: their description.
      is_symmetric: whether no group has a zero point other than the middle.
      least_zero: the smallest code that stands for zero.
    """

    codes: WholeNumberCodes
    is_symmetric: bool
    least_zero: int


class Kernel(NamedTuple):
    """The kernels of linear layers whose tensors a row of a family's table names.

    Attributes:
      template: the name of the tensors, with `{i}` and `{e}`.
      path: of one of the leaves.
      part: the part of the model that they belong to, if it is in codes; None: they stay whole.
    """

    template: str
    path: str
    part: str | None


class Container(abc.ABC):
    """A format of checkpoints.

    Attributes:
      bits: of whole numbers.
      encoders: other formats of numbers, by their names on the command line.
    """

    bits: ClassVar[tuple[int, ...]]
    encoders: ClassVar[Mapping[str, Callable[[], Encoder]]] = {}

    @abc.abstractmethod
    def whole_numbers(self, bits: int, group_size: int | None, quantise: Quantise) -> WholeNumbers:
        """Returns the encoder of whole numbers of some bits, in groups of inputs; None: in whole rows."""

    def keeping(self, encoders: Mapping[str, Encoder], own: OwnCodes) -> dict[str, Encoder]:
        """Returns the encoders, by part, of a model whose experts keep their own codes."""
        experts = encoders["experts"]
        assert isinstance(experts, WholeNumbers)
        return {**encoders, "experts": dataclasses.replace(experts, symmetric=own.is_symmetric)}

    @abc.abstractmethod
    def scales(self, dtype: np.dtype) -> np.dtype:
        """Returns the dtype of the scales of new whole numbers in a leaf of this dtype."""

    @abc.abstractmethod
    def kept_scales(self, own: OwnCodes, scales: Iterable[np.ndarray]) -> np.dtype | None:
        """Returns the dtype of the scales of experts that keep their codes; None: that of new ones.

        Those that they have, half steps, are read only if they are asked for.
        """

    @abc.abstractmethod
    def describe(self, encoders: Mapping[str, Encoder], kernels: Iterable[Kernel]) -> dict[str, Any]:
        """Returns the `quantization_config` of config.json, given the encoders by part."""

    def notes(self, encoders: Mapping[str, Encoder], dtype: str) -> list[str]:
        """Returns lines about who reads it, and how, if the other parameters are of a dtype."""
        return []
