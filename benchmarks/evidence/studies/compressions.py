"""Studies of compression: which kept models are compressed by what, and where the results stand."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from evidence.results import Key, ResultsFile
from evidence.studies.compression_job import Compression, compress_model, describe_model
from evidence.studies.jobs import Job, Place
from evidence.studies.noise_job import DeltaNoise, measure_noise
from evidence.studies.probes import Probes
from evidence.studies.scales import Scale
from evidence.studies.training_job import kept_path
from evidence.studies.variants import PERMUTED, UNCOMPRESSED, VARIANTS, Chosen, label

_SEED = "-s{seed}"


@dataclasses.dataclass(frozen=True)
class _OfKeptModels:
    """A study of models that other studies keep, one for every seed; a model is waited for.

    Attributes:
      name: key in the results.
      scale: of the models.
      model: name under which they are kept; `{seed}` in it stands for the seed.
      seeds: of the models, and of what is random.
      after: where the results of the jobs that make these models stand; with `{seed}` likewise.
    """

    name: str
    scale: Scale
    model: str
    seeds: tuple[int, ...]
    after: Key

    keeps: ClassVar[tuple[Key, ...]] = ()

    @property
    def scale_name(self) -> str:
        return self.scale.name

    @property
    def needs(self) -> tuple[Key, ...]:
        return tuple(self._made(seed) for seed in self.seeds)

    @property
    def paths(self) -> Iterator[Key]:
        """Where all of its results stand."""
        raise NotImplementedError

    def is_done(self, results: ResultsFile) -> bool:
        """Whether all of its results are there."""
        return all(results.get(*path) is not None for path in self.paths)

    def model_of(self, seed: int) -> str:
        """The name under which the model of a seed is kept."""
        return self.model.format(seed=seed)

    def seeds_there(self, results: ResultsFile, place: Place) -> list[int]:
        """Those whose models are complete."""
        return [
            seed
            for seed in self.seeds
            if results.get(*self._made(seed)) is not None
            and kept_path(place, self.scale.name, self.model_of(seed)).exists()
        ]

    def _made(self, seed: int) -> Key:
        """Where the result stands of the job that makes the model of a seed."""
        return tuple(key.format(seed=seed) for key in self.after)

    def _path(self, what: str, seed: int) -> Key:
        return self.name, self.scale.name, self.model.replace(_SEED, ""), what, str(seed)


@dataclasses.dataclass(frozen=True)
class Compressions(_OfKeptModels):
    """Kept models, compressed in every way and scored.

    Attributes:
      variants: names of variants, and the values of each; the most telling first.
      probes: what compressed models are asked beside the loss; None: nothing.
      serve: variants of which one compressed model, of the first value and seed, is also scored as it is.
      matched: whether errors are also computed with the neurons matched anew.
      windows: whether the losses of all windows of text are kept: what a single model's effects are told by.
    """

    variants: Chosen
    probes: Probes | None = None
    serve: frozenset[str] = frozenset()
    matched: bool = True
    windows: bool = False

    def path(self, variant: str, value: float, seed: int) -> Key:
        """Where the result of a compressed model stands."""
        return self._path(label(variant, value), seed)

    def whole_path(self, seed: int) -> Key:
        """Where that of the model itself stands."""
        return self._path(UNCOMPRESSED, seed)

    @property
    def paths(self) -> Iterator[Key]:
        for seed in self.seeds:
            yield self.whole_path(seed)
            for name, values in self.variants.items():
                yield from (self.path(name, value, seed) for value in values)

    def jobs(self, results: ResultsFile, place: Place) -> Iterator[Job]:
        """The models as they are; then the first value of every variant, and then the others."""
        seeds = self.seeds_there(results, place)
        for seed in seeds:
            arguments = {"scale": self.scale.name, "model": self.model_of(seed), "probes": self.probes}
            arguments |= {"windows": True} if self.windows else {}
            yield Job(self.whole_path(seed), describe_model, arguments)
        points = [(name, value, value == values[0]) for name, values in self.variants.items() for value in values]
        for name, value, is_first in sorted(points, key=lambda point: not point[2]):
            for seed in seeds:
                served = is_first and name in self.serve and seed == self.seeds[0]
                asked = self._asked(name, value, seed, served=served)
                yield Job(self.path(name, value, seed), compress_model, {"asked": asked})

    def _asked(self, name: str, value: float, seed: int, *, served: bool) -> Compression:
        variant = VARIANTS[name]
        return Compression(
            self.scale.name,
            self.model_of(seed),
            variant.method,
            variant.options_of(value, seed),
            dense=variant.dense,
            calibrated=variant.calibrated,
            permuted=seed if variant.family == PERMUTED else None,
            served=served,
            matched=self.matched,
            windows=self.windows,
            probes=self.probes,
        )


@dataclasses.dataclass(frozen=True)
class DeltaSizes(_OfKeptModels):
    """Deltas of kept models are multiplied by factors; then entries are dropped.

    Attributes:
      factors: of the deltas, the most telling first.
      rates: shares of entries that are dropped.
    """

    factors: tuple[float, ...] = (1.0, 2.0, 0.5, 0.25)
    rates: tuple[float, ...] = (0.5, 0.9, 0.99)

    def path(self, factor: float, seed: int) -> Key:
        """Where a result stands."""
        return self._path(f"deltas × {factor:g}", seed)

    @property
    def paths(self) -> Iterator[Key]:
        return (self.path(factor, seed) for factor in self.factors for seed in self.seeds)

    def jobs(self, results: ResultsFile, place: Place) -> Iterator[Job]:
        """One for every factor and seed."""
        seeds = self.seeds_there(results, place)
        for factor in self.factors:
            for seed in seeds:
                asked = DeltaNoise(self.scale.name, self.model_of(seed), factor, self.rates, seed)
                yield Job(self.path(factor, seed), measure_noise, {"asked": asked})
