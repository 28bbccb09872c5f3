"""The interface of all methods of compression."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import numpy as np

from moe_jax.compression.alignment.matching import AlignmentProgress
from moe_jax.compression.calibration.map_analysis import MapAnalysis
from moe_jax.compression.coding.storage import LEAF_OVERHEAD, AnyLayout
from moe_jax.compression.linear_maps import LinearMap, has_codes_below
from moe_jax.compression.options.in_common import AroundCentre, MethodOptions, Of
from moe_jax.compression.report import DENSE, MEAN, OWN, LayerFigures
from moe_jax.compression.source_layer import SourceLayer, Write, check_weights, mean_kernel
from moe_jax.conversion.families import FAMILIES
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import count_bytes, count_parameters
from moe_jax.experts import BankConfig, BaseCodes
from moe_jax.experts.forms.coding import Wanted
from moe_jax.model_io.model_source import ModelSource
from moe_jax.model_io.without_codes import weights_in_linear_codes
from moe_jax.models import FFNConfig, LinearCodes, ModelConfig, MoEConfig

Analysis = Mapping[str, np.ndarray]
"""Arrays by name, as `Method.analyse` returns them for a layer; small enough to be kept for all layers at once."""

Tick = Callable[[float], None]

EXPERTS = "experts"
"""The name of a part of a model beside those of linear maps (`linear_maps.Part`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The next form of a model.

    Attributes:
      banks: the new config of every layer whose experts are compressed, by index.
      codes: of linear maps, by their paths; the others stay whole.
      expected: the divergence of the model's predictions that is expected of every part, nats per token; may be empty.
    """

    banks: Mapping[int, MoEConfig]
    codes: Mapping[str, LinearCodes]
    expected: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rest:
    """The model outside its experts.

    Attributes:
      maps: linear maps to put in codes.
      itemsizes: bytes of a number of their kernels as they are stored, by path.
      fixed_bytes: of all that stays as it is, outside the experts and these maps.
      weights: the number of weights of the whole model.
      analysis: of the maps; None: not known yet, or not needed.
    """

    maps: Sequence[LinearMap] = ()
    itemsizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fixed_bytes: int = 0
    weights: int = 0
    analysis: MapAnalysis | None = None

    @classmethod
    def of(cls, source: ModelSource, maps: Sequence[LinearMap], indices: Sequence[int]) -> Self:
        """Returns what is known before any analysis, given the maps, and the layers whose experts are compressed."""
        stored, experts = source.specs(), tuple(f"layers/{i}/mlp/experts/" for i in indices)
        of_maps = {one.leaf for one in maps}
        fixed = {path: spec for path, spec in stored.items() if path not in of_maps and not path.startswith(experts)}
        return cls(
            maps=maps,
            itemsizes={one.path: stored[one.leaf].dtype.itemsize for one in maps},
            fixed_bytes=count_bytes(fixed.values()) + LEAF_OVERHEAD * len(fixed),
            weights=count_parameters(stored.values()) + weights_in_linear_codes(source.config),
        )


class Base:
    """The base of one layer; its `origin` is `DENSE`, `OWN` or `MEAN`."""

    def __init__(self, layer: SourceLayer, dense: ModelSource | None):
        """Chooses: the dense model if there is one, else the bank's own base, else the mean of the experts."""
        self._layer = layer
        self._dense = dense
        self.origin = DENSE if dense is not None else OWN if layer.moe.bank.has_base else MEAN

    def kernel(self, name: str) -> np.ndarray:
        """The base of one matrix, [in, out], as it is where it comes from; the mean is float32."""
        if self._dense is not None:
            path = f"layers/{self._layer.index}/mlp/{name}/kernel"
            return check_weights(f"{path} of --base", self._dense.read(path))
        if self.origin == OWN:
            return self._layer.base(name)
        return mean_kernel(self._layer.kernels(name))


def check_base(base: ModelConfig, model: ModelConfig, layers: Iterable[int]) -> None:
    """Raises `InputError` unless `base` can be the dense model that the MoE layers of `model` came from."""
    if base.moe_layers:
        raise InputError("--base is an MoE itself; expected the dense model that the experts came from")
    family = FAMILIES.get(base.family)
    if model.family != base.family and (family is None or model.family not in family.moe_formats):
        raise InputError(f"--base is a {base.family!r} model and the experts are of a {model.family!r} one")
    if (base.num_layers, base.d_model) != (model.num_layers, model.d_model):
        raise InputError(
            f"--base has {base.num_layers} layers of width {base.d_model}, "
            f"the model {model.num_layers} of width {model.d_model}"
        )
    for i in layers:
        moe, ffn = model.layers[i].mlp, base.layers[i].mlp
        assert isinstance(moe, MoEConfig)
        if has_codes_below(base.layers[i], "mlp/"):
            raise InputError(f"--base: the FFN of layer {i} is in codes; give the model that it was made from")
        if ffn != moe.expert:
            raise InputError(f"--base has another FFN than the experts in layer {i}: {ffn}, and not {moe.expert}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(MethodOptions, abc.ABC):
    """A frozen dataclass: its fields are its options, and also the command's.

    A job analyses every layer, then plans what all of them become, then compresses one after another.

    Attributes:
      layouts: the layouts in which it can store the experts, as `moe-jax plan --compress` shows them.
      codes_format: fields of `Wanted` that all of its codes have, whatever its own options are.
      origin: what takes the place of a base: `BARYCENTER`, or `NO_BASE`; None: the base that the user may give, see
        `Base`.
      planned_centre_bits: of a centre that it stores in codes without being asked to, as `moe-jax plan` counts it.
      needs_sensitivities: whether it has to know how much depends on each layer (`calibration.sensitivities`).
    """

    layouts: ClassVar[tuple[AnyLayout, ...]]
    codes_format: ClassVar[Mapping[str, Any]] = {}
    origin: ClassVar[str | None] = None
    planned_centre_bits: ClassVar[int | None] = None
    needs_sensitivities: ClassVar[bool] = False

    @property
    def part(self) -> Of:
        """The part of the model that is compressed."""
        return "experts"

    @property
    def coder_options(self) -> Mapping[str, bool]:
        """Options of the coders of linear maps, see `InOrder`; of a method that has some."""
        return {}

    def linear_codes(self, maps: Sequence[LinearMap]) -> dict[str, LinearCodes]:
        """Returns the codes of linear maps outside the experts, by their paths; by default there are none."""
        del maps
        return {}

    @property
    def codes_of_maps(self) -> Mapping[str, Any] | None:
        """Options of the codes of linear maps beside their bits, if an analysis chooses these; None: none does."""
        return None

    def plans(
        self,
        layers: Sequence[SourceLayer],
        analyses: Mapping[int, Analysis],
        rest: Rest,
        factors: Mapping[str, float] = MappingProxyType({}),
    ) -> list[Plan]:
        """Returns what `plan` and `linear_codes` return, or several such plans, the best expected one first.

        `factors`: by part of the model, how much more than expected its divergences are.
        """
        del factors
        return [Plan(banks=self.plan(layers, analyses), codes=self.linear_codes(rest.maps))]

    def extreme_plans(self, layers: Sequence[SourceLayer], rest: Rest) -> tuple[Plan, Plan] | None:
        """Returns the smallest and the largest of the plans that a budget chooses from; None: the method has none."""
        del layers, rest
        return None

    @property
    def tried_plans(self) -> int:
        """The most plans that are carried out on a few rows and measured before one is taken; 1: none is."""
        return 1

    def check_model(self, layers: Sequence[SourceLayer], rest: Rest) -> None:
        """Raises `InputError` if the options do not go with the model as a whole; as `check`, before any analysis."""
        del layers, rest

    @classmethod
    def check_configs(cls, layers: Mapping[int, MoEConfig], keep: float) -> None:
        """Raises `InputError` if no layers of such configs, by index, can be compressed so; for a plan without a model.

        By default all can. `keep` is the share that stays.
        """
        del layers, keep

    def check(self, layers: Sequence[SourceLayer]) -> None:
        """Raises `InputError` if the options do not go with the layers to compress; from their configs alone."""
        del layers

    def analyse(self, layer: SourceLayer, tick: Tick = lambda share: None) -> Analysis:
        """Computes what `plan` and `compress` need to know about the weights of a layer, where that takes long.

        The result is kept on the disk until the job is done: a resumed job does not compute it again. `tick` is called
        with the share of the work that is done.
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
        """Computes and writes the leaves of one layer, given what `plan` and `analyse` returned for it.

        Deltas may be taken from the base. Leaves that `write` is not given stay as they are.
        """


def all_alike(
    layers: Sequence[SourceLayer],
    wanted: Wanted,
    analyses: Mapping[int, Analysis],
    *,
    base: Literal["shared", "none"],
    codes: BaseCodes | None = None,
) -> dict[int, MoEConfig]:
    """The new config of every layer, by index, if all get the same. Layers of equal shape stay equal.

    Where they are needed, analyses have `shares` of the matrices, as `mean_shares` gives them, which are averaged over
    layers of one shape. Without codes, a base that experts share has the dtype of the model.
    """
    shares: dict[FFNConfig, list[np.ndarray]] = {}
    for layer in layers if wanted.needs_shares else ():
        shares.setdefault(layer.moe.expert, []).append(analyses[layer.index]["shares"])
    means = {expert: np.mean(found, axis=0).tolist() for expert, found in shares.items()}
    banks = {
        layer.index: BankConfig(layer.wanted(wanted, means.get(layer.moe.expert)), base=base, base_codes=codes)
        for layer in layers
    }
    return {layer.index: layer.target(banks[layer.index]) for layer in layers}


def alignment_progress(tick: Tick, clouds: int) -> AlignmentProgress:
    """The progress of an alignment: how many rounds there will be is not known, so that each takes half of the rest."""
    return lambda round_, done, objective: tick(1 - 0.5 ** (round_ - 1 + done / clouds))


def check_calibrated(layers: Sequence[SourceLayer]) -> None:
    """Raises `InputError` if it is not known what the experts of a layer are given on a text."""
    if any(layer.rows is None for layer in layers):
        raise InputError("this method looks at what the experts do on a text: give one with --calibrate TEXT")


class HasCentre(AroundCentre):
    """A method whose centre may be in codes."""

    @property
    def codes(self) -> BaseCodes | None:
        """The codes of the centre; None: it has the dtype of the model."""
        return None if self.centre is None else BaseCodes(**self.centre)
