"""The bytes of every part of a model whose experts, or also linear maps, a method puts in codes; from its config alone.

The plan is the one that `compress` makes, and the leaves of its config are counted: no formula can disagree with them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from moe_jax.compression.calibration.recording import NOT_YET_RECORDED
from moe_jax.compression.calibration.sensitivities import check_full_experts
from moe_jax.compression.coding.storage import LEAF_OVERHEAD
from moe_jax.compression.linear_maps import parts_of_leaves
from moe_jax.compression.methods.interface import EXPERTS, Plan, Rest
from moe_jax.compression.plan_work import carried_out
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.compression.spec import METHOD_OPTIONS, check_options, make_method, parse_layers
from moe_jax.compression.stream import choose_layers, linear_maps_of
from moe_jax.core.formatting import count_bytes
from moe_jax.model_io.in_memory import ModelInMemory
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import ModelConfig

AS_IT_IS, LEAST, MOST, REST = "as it is", "least", "most", "the rest"
PARTS = (EXPERTS, "attention", "dense", "embedding", "head", REST)
"""The experts, the linear maps by `linear_maps.Part`, and all that is neither: it stays as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartSizes:
    """A model in one way of compression.

    Attributes:
      way: in words, such as `bits 4`; `least` and `most` of what a budget can choose.
      parts: number of bytes of the leaves of every part, by its name; parts that a model does not have are left out.
      bits_per_weight: of the whole model, everything included.
      budget: bytes of what a budget is for, in the count of a budget, which adds what the disk knows of every leaf:
        the experts, or with linear maps the model; None: the method has no budget.
    """

    way: str
    parts: Mapping[str, int]
    bits_per_weight: float
    budget: int | None

    @property
    def total(self) -> int:
        """The number of bytes of all leaves."""
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedParts:
    """The bytes of a model by part, first as it is, and then in every way; `of` is what is compressed of it."""

    method: str
    of: str
    dtype: str
    sizes: tuple[PartSizes, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the sizes as JSON, in bytes."""
        sizes = [dataclasses.asdict(one) | {"total": one.total} for one in self.sizes]
        return {"method": self.method, "of": self.of, "dtype": self.dtype, "sizes": sizes}


class _OnlyShapes:
    """The leaves of a model that need not be there."""

    def __init__(self, specs: dict[str, jax.ShapeDtypeStruct]):
        self.specs = specs

    def read(self, path: str) -> np.ndarray:
        raise AssertionError(f"a plan reads no weights, and asks for {path}")

    def stored_bytes(self, path: str) -> int:
        return count_bytes([self.specs[path]])


def planned_parts(
    config: ModelConfig,
    method: str,
    options: Mapping[str, Any],
    *,
    compress_layers: str | None = None,
    dtype: str | None = None,
) -> PlannedParts:
    """Counts the bytes of every part of the model that `compress` would write.

    Without the option that says how much is kept, all its usual values are counted; of a method with a budget, the
    smallest and the largest model that it chooses from.

    Args:
      config: that of the model.
      method: of compression.
      options: of the method, by their names; `of` is among them.
      compress_layers: the layers whose experts are compressed; None: all.
      dtype: of all parameters; None: that of the config.

    Raises:
      InputError: for an option that the method does not have, or that does not go with the model.
    """
    check_options([method], options)
    swept, usual = METHOD_OPTIONS[method].swept
    values = (options[swept],) if swept in options else usual
    if options.get("levels") == "fitted" and swept not in options:
        values = tuple(value for value in usual if value != 8)  # tables have at most 16 levels
    methods = {f"{swept} {value}": make_method(method, {**options, swept: value}) for value in values}
    first = next(iter(methods.values()))
    layers = None if compress_layers is None else parse_layers(compress_layers, config)
    indices = choose_layers(config, layers, part=first.part)
    if first.needs_sensitivities and indices:
        check_full_experts(config)
    source = ModelInMemory(config, _OnlyShapes(leaf_specs(config, dtype)))
    opened = [SourceLayer(source, i, calibration=NOT_YET_RECORDED) for i in indices]
    rest = Rest.of(source, linear_maps_of(config, first, extended=False), indices)
    extremes = first.extreme_plans(opened, rest)
    made = {AS_IT_IS: Plan(banks={}, codes={})}
    if extremes is None:
        made |= {way: one.plans(opened, {}, rest)[0] for way, one in methods.items()}
    else:
        made |= zip((LEAST, MOST), extremes, strict=True)
    sizes = [_sizes(way, config, plan, rest, dtype, budget=way in (LEAST, MOST)) for way, plan in made.items()]
    return PlannedParts(method=method, of=first.part, dtype=dtype or config.dtype, sizes=tuple(sizes))


def _sizes(way: str, config: ModelConfig, plan: Plan, rest: Rest, dtype: str | None, *, budget: bool) -> PartSizes:
    made = carried_out(config, plan)
    specs, part_of = leaf_specs(made, dtype), parts_of_leaves(made)
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    for path, spec in specs.items():
        parts[EXPERTS if "/mlp/experts/" in path else part_of.get(path, REST)] += count_bytes([spec])
    experts = tuple(f"layers/{i}/mlp/experts/" for i in plan.banks)
    counted = [spec for path, spec in specs.items() if rest.maps or path.startswith(experts)]
    return PartSizes(
        way=way,
        parts={part: nbytes for part, nbytes in parts.items() if nbytes},
        bits_per_weight=8 * sum(parts.values()) / rest.weights,
        budget=count_bytes(counted) + LEAF_OVERHEAD * len(counted) if budget else None,
    )
