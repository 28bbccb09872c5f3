"""`ders-sparsify`: every delta keeps a share of its entries (methods.md 4; DARE, arXiv 2311.03099).

Everything random is drawn with NumPy on the host, from a separate Philox stream for every layer, matrix and expert. So
the result depends neither on the order in which these are processed nor on whether a job was resumed.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from moe_jax.compression.coding.expert_coders import ExpertCoder
from moe_jax.compression.coding.pruning import largest_mask
from moe_jax.compression.coding.shared_base import codes_of_options
from moe_jax.compression.layer_figures import LayerFigures
from moe_jax.compression.methods.delta_base import Base, compress_deltas
from moe_jax.compression.methods.interface import Analysis, Method
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.draws import draw_positions
from moe_jax.core.errors import InputError, check_member
from moe_jax.experts import BankConfig, BaseCodes, FFNConfig
from moe_jax.experts.bank_config import Code
from moe_jax.experts.forms import Sparse
from moe_jax.experts.forms.coding import Layout, Residual
from moe_jax.experts.forms.sparse import encode_positions, smallest_encoding
from moe_jax.models import MoEConfig

KEEP = ("random", "exact", "magnitude")

# What a stream of random numbers is for. Part of its key: changing one changes what a seed gives. Upcycling uses 0-9.
_COUNT, _POSITIONS = 10, 11
_MATRICES = ("gate", "up", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sparsify(Method):
    """Sparse deltas over a shared base.

    Attributes:
      drop: share p of the entries that are left out, in [0, 1); required.
      keep: which entries stay. `random`: each with probability 1-p, divided by 1-p (DARE). `exact`: as many in every
        kernel, drawn at random and divided by their share; both are right on average. `magnitude`: the largest ones
        as they are, which is the least error; of a layer that was calibrated, those of the inputs that count most.
      seed: of everything random.
      centre_bits: of a code of the centre: 8, 4, 3 or 2, or `nf4`; residuals are taken from what these codes stand for.
        By default it is stored in the dtype of the model.
      centre_group_size: of the centre's codes: entries along the input axis that share a scale, by default 128.
    """

    swept: ClassVar[tuple[str, tuple[float, ...]]] = ("drop", (0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99))
    layouts: ClassVar[tuple[Layout, ...]] = Sparse.layouts()

    drop: float
    keep: Literal["random", "exact", "magnitude"] = "random"
    seed: int = 0
    centre_bits: Code | None = None
    centre_group_size: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.drop < 1.0:
            raise InputError(f"drop={self.drop:g} must lie in [0, 1): it is the share of entries left out")
        check_member("keep", self.keep, KEEP)
        if self.seed < 0:
            raise InputError(f"seed={self.seed} must not be negative")
        self._codes  # noqa: B018  (checks those of the centre)

    def plan(self, layers: Sequence[SourceLayer], analyses: Mapping[int, Analysis]) -> dict[int, MoEConfig]:
        """Layers of equal shape have room for the same count, the largest, in the fewest bytes."""
        entries: dict[FFNConfig, int] = {}
        if self.keep == "random":
            for layer in layers:
                counts = [
                    self._count(layer.index, name, expert, math.prod(shape))
                    for name, shape in layer.shapes.items()
                    for expert in range(layer.num_experts)
                ]
                entries[layer.moe.expert] = max(1, entries.get(layer.moe.expert, 0), *counts)
        return {layer.index: layer.target(self._bank(layer, entries.get(layer.moe.expert))) for layer in layers}

    def compress(
        self, layer: SourceLayer, base: Base, target: MoEConfig, write: Write, analysis: Analysis
    ) -> LayerFigures:
        form = target.bank.form
        assert isinstance(form, Sparse)

        def encode(
            name: str, expert: int, residual: Residual, coder: ExpertCoder
        ) -> tuple[dict[str, np.ndarray], np.ndarray]:
            delta = residual.values
            entries = form.kept_entries(layer.matrices[name])
            chosen = self._choose(layer.index, name, expert, delta, entries, coder.importances)
            with np.errstate(over="ignore"):  # said in our own words below
                values = (delta.reshape(-1)[chosen.positions] * chosen.factors).astype(residual.dtype)
            if not np.isfinite(values).all():
                raise InputError(
                    f"values of the {name} delta of expert {expert} in layer {layer.index} are too large for "
                    f"{values.dtype} when they are divided by the kept share; use --keep magnitude"
                )
            approximation = np.zeros(delta.shape, np.float32)
            approximation.reshape(-1)[chosen.positions] = values.astype(np.float32)
            return {**encode_positions(chosen.positions, delta.shape, form.encoding), "values": values}, approximation

        return compress_deltas(layer, base, target.bank, write, encode=encode)

    @property
    def _codes(self) -> BaseCodes | None:
        return codes_of_options(self.centre_bits, self.centre_group_size)

    def _bank(self, layer: SourceLayer, entries: int | None) -> BankConfig:
        form = Sparse(rate=self.drop, entries=entries)
        counts = [form.kept_entries(matrix) for matrix in layer.matrices.values()]
        encoding = smallest_encoding(layer.shapes.values(), counts)
        return BankConfig(dataclasses.replace(form, encoding=encoding), base_codes=self._codes)

    def _choose(
        self,
        layer: int,
        name: str,
        expert: int,
        delta: np.ndarray,
        entries: int,
        importances: Float[np.ndarray, " i"] | None,
    ) -> "_Chosen":
        if self.keep == "magnitude":
            magnitudes = delta if importances is None else delta * importances[:, None]
            return _Chosen(np.flatnonzero(largest_mask(magnitudes, entries)), np.float32(1))
        random = self._stream(layer, _POSITIONS, name, expert)
        positions = draw_positions(random, delta.size, entries)
        if self.keep == "exact":
            return _Chosen(positions, np.float32(delta.size / entries))
        # A random part of a random set of positions: the rest only fills the storage up.
        filling = entries - self._count(layer, name, expert, delta.size)
        factors = np.full(entries, 1 / (1 - self.drop), np.float32)
        factors[random.choice(entries, filling, replace=False, shuffle=False)] = 0
        return _Chosen(positions, factors)

    def _count(self, layer: int, name: str, expert: int, size: int) -> int:
        """How many entries independent draws keep; known without weights, before anything is written."""
        return int(self._stream(layer, _COUNT, name, expert).binomial(size, 1 - self.drop))

    def _stream(self, layer: int, purpose: int, name: str, expert: int) -> np.random.Generator:
        key = (layer, purpose, _MATRICES.index(name), expert)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=key)))


class _Chosen(NamedTuple):
    """Flat positions, ascending, and what the entries there are multiplied by."""

    positions: np.ndarray
    factors: np.ndarray | np.float32
