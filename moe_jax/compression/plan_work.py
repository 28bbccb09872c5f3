"""The work that a plan asks for, as a job does it and as plans are tried before one is taken."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.compression.calibration.coded_pass import CodedPass, moment_of_head
from moe_jax.compression.calibration.expert_statistics import routed_by_source, routed_tokens
from moe_jax.compression.calibration.recording import Calibration, LayerRows
from moe_jax.compression.in_order import InOrder, Nowhere, OnLayer, TakesLeaves
from moe_jax.compression.linear_maps import with_codes
from moe_jax.compression.measured_plans import MOST_TOKENS, MakePlans, Tried, best_plan
from moe_jax.compression.methods.interface import Analysis, Base, Method, Plan, Rest
from moe_jax.compression.report import LayerFigures
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.errors import InputError
from moe_jax.core.finite import DoesNotFit
from moe_jax.core.terminal import Progress
from moe_jax.distributed.sharding import make_mesh
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig


def carried_out(config: ModelConfig, plan: Plan) -> ModelConfig:
    """Returns the config of the model that a plan makes of one with this config."""
    layers = list(config.layers)
    for i, moe in plan.banks.items():
        layers[i] = dataclasses.replace(layers[i], mlp=moe)
    return with_codes(dataclasses.replace(config, layers=tuple(layers)), plan.codes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanWork:
    """Carries out plans of a job: everything that any of them needs.

    Attributes:
      source: the model.
      method: of compression.
      base: the dense model that the experts came from, if it is given.
      extended: whether universal FFNs become experts.
      indices: the layers whose experts are compressed.
      rest: the model outside its experts.
      calibration: on a text; None: without one.
      progress: called as work proceeds.
    """

    source: ModelSource
    method: Method
    base: ModelSource | None
    extended: bool
    indices: Sequence[int]
    rest: Rest
    calibration: Calibration | None
    progress: Progress

    def open_layer(self, i: int) -> SourceLayer:
        """Returns the experts of a layer; anew every time, for it keeps what it read last."""
        universal = self.extended and self.source.config.moe(i).universal_beside
        recorded = None if self.calibration is None else self.calibration.layers[i]
        return SourceLayer(self.source, i, with_universal=universal, calibration=recorded)

    def base_of(self, layer: SourceLayer) -> Base:
        """Returns the base of a layer."""
        return Base(layer, self.base)

    def config_of(self, plan: Plan) -> ModelConfig:
        """Returns the config of the model that a plan makes."""
        return carried_out(self.source.config, plan)

    def compress_layer(
        self,
        plan: Plan,
        analyses: Mapping[int, Analysis],
        i: int,
        write: Write,
        rows: LayerRows | None = None,
    ) -> LayerFigures:
        """Compresses the experts of a layer; with `rows`, for what they are given now and not on the recording."""
        layer = self.open_layer(i)
        if rows is not None:
            layer.give(rows)
        try:
            figures = self.method.compress(layer, self.base_of(layer), plan.banks[i], write, analyses[i])
        except DoesNotFit as error:
            raise InputError(f"layer {i}: {error}, for the whole model, with moe-jax convert --dtype") from None
        # Figures of outputs are there if the method looks at what experts are given.
        if figures.output_error is None:
            return figures
        by_source = None if self.calibration is None else routed_by_source(layer, self.calibration.sources)
        return dataclasses.replace(figures, expert_tokens=routed_tokens(layer), expert_tokens_by_source=by_source)

    def in_order(
        self,
        plan: Plan,
        analyses: Mapping[int, Analysis],
        rows: CalibrationRows | None,
        place: Path,
        writer: TakesLeaves,
        *,
        doing: str,
        on_layer: OnLayer = lambda layer, figures, nbytes: None,
    ) -> InOrder:
        """Returns the work of a plan layer by layer, with a pass over rows of the text in the folder `place`."""
        how: Any = {"rows": rows, "folder": place, "mesh": make_mesh({"data": -1}, jax.local_devices())}
        return InOrder(
            source=self.source,
            config=self.config_of(plan),
            indices=self.indices,
            compress_layer=partial(self.compress_layer, plan, analyses),
            maps=[one for one in self.rest.maps if one.path in plan.codes],
            codes=plan.codes,
            begin_pass=None if rows is None else partial(CodedPass, self.source, **how),
            head_moment=partial(moment_of_head, self.source, **how),
            coder_options=self.method.coder_options,
            writer=writer,
            progress=self.progress,
            doing=doing,
            on_layer=on_layer,
        )

    def best_plan(
        self, make_plans: MakePlans, analyses: Mapping[int, Analysis], kept: Path | None
    ) -> tuple[Plan, tuple[Tried, ...]]:
        """Tries plans on a few rows, and returns the best measured one with all that were tried; see `measured_plans`.

        Raises:
          InputError: if there is no text, or there are several processes.
        """
        if self.calibration is None or self.calibration.rows is None:
            raise InputError("--tries: plans are measured on a text; give one with --calibrate TEXT")
        if jax.process_count() > 1:
            raise InputError("--tries: plans are measured in one process")
        rows = self.calibration.rows
        rows = rows.first(max(1, MOST_TOKENS // rows.length))

        def measure(plan: Plan) -> float:
            with tempfile.TemporaryDirectory(prefix="moe_jax_plan_") as folder:
                work = self.in_order(plan, analyses, rows, Path(folder), Nowhere(), doing="trying a plan")
                losses = work.write().losses
            assert losses is not None
            return losses.divergence

        return best_plan(make_plans, measure, self.method.tried_plans, kept=kept)
