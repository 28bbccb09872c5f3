"""The interface of all methods of compression."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from moe_jax.compression.coding.storage import AnyLayout
from moe_jax.compression.layer_figures import LayerFigures
from moe_jax.compression.methods.delta_base import Base
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.errors import InputError
from moe_jax.models import MoEConfig

Analysis = Mapping[str, np.ndarray]
"""Arrays by name, as `Method.analyse` returns them for a layer; small enough to be kept for all layers at once."""

Tick = Callable[[float], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
    """A frozen dataclass: its fields are its options, and also the command's.

    A job analyses every layer, then plans what all of them become, then compresses one after another.

    Attributes:
      swept: name of the option that says how much is kept, and the values that a sweep tries.
      layouts: the layouts in which it can store the experts, as `moe-jax plan --compress` shows them.
      codes_format: fields of `Wanted` that all of its codes have, whatever its own options are.
      origin: what takes the place of a base: `BARYCENTER`, or `NO_BASE`; None: the base that the user may give, see
        `delta_base.Base`.
      planned_centre_bits: of a centre that it stores in codes without being asked to, as `moe-jax plan` counts it.
      needs_calibration: whether it can do nothing without a text; a sweep of all methods leaves it out then.
      needs_sensitivities: whether it has to know how much depends on each layer (`allocation.sensitivity_pass`).
    """

    swept: ClassVar[tuple[str, tuple[Any, ...]]]
    layouts: ClassVar[tuple[AnyLayout, ...]]
    codes_format: ClassVar[Mapping[str, Any]] = {}
    origin: ClassVar[str | None] = None
    planned_centre_bits: ClassVar[int | None] = None
    needs_calibration: ClassVar[bool] = False
    needs_sensitivities: ClassVar[bool] = False

    def check(self, layers: Sequence[SourceLayer]) -> None:
        """Raises `InputError` if the options do not go with the layers to compress; from their configs alone."""
        del layers

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """Computes what `plan` and `compress` need to know about the weights of a layer, where that takes long.

        The result is kept on the disk until the job is done: a resumed job does not compute it again.

        Args:
          layer: its experts.
          tick: called with the share of the work that is done.

        Raises:
          InputError: if weights are not finite.
        """
        del layer, tick
        return {}

    @abc.abstractmethod
    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        """The new config of every layer to compress, by index. Called before the first leaf is written."""

    @abc.abstractmethod
    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        """Computes and writes the leaves of one layer.

        Args:
          layer: its experts as they are.
          base: what deltas may be taken from.
          target: what `plan` said the layer becomes.
          write: takes leaves by their paths below `mlp`. Leaves that it is not given stay as they are.
          analysis: what `analyse` returned for the layer.

        Raises:
          InputError: if weights are not finite.
        """


def check_calibrated(layers: Sequence[SourceLayer]) -> None:
    """Raises `InputError` if it is not known what the experts of a layer are given on a text."""
    if any(layer.rows is None for layer in layers):
        raise InputError("this method looks at what the experts do on a text: give one with --calibrate TEXT")
