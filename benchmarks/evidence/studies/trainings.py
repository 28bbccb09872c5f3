"""Studies of training: the rates of every family are chosen first, then every seed is trained and scored."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from evidence.results import Key, ResultsFile
from evidence.studies.jobs import Job, Place
from evidence.studies.rates import Rates, rates_of, search, text_of
from evidence.studies.scales import RATE_SEED, Scale
from evidence.studies.training_job import DENSE, SELECTION, TEST, Run, kept_folder, kept_path, train_run, trained_groups

# Half decades: full models learn best near 1e-3, what begins at nothing needs more.
_FIRST = {"base": -6, "experts": -6, "router": -6, "deltas": -5, "adapters": -4}


@dataclasses.dataclass(frozen=True)
class Kept:
    """A model that others begin with, trained by one long job.

    Attributes:
      scale, model: under which it is kept.
      work, arguments, threads: of the job.
      after: names of kept models of the scale that it begins with.
    """

    name: ClassVar[str] = "models"

    scale: str
    model: str
    work: Callable[..., dict[str, Any]]
    arguments: Mapping[str, Any]
    threads: int = 1
    after: tuple[str, ...] = ()

    @property
    def path(self) -> Key:
        return self._path(self.model)

    @property
    def needs(self) -> tuple[Key, ...]:
        return tuple(map(self._path, self.after))

    @property
    def scale_name(self) -> str:
        return self.scale

    @property
    def keeps(self) -> tuple[Key, ...]:
        return (self.path,)

    def is_done(self, results: ResultsFile) -> bool:
        """Whether the one job is done."""
        return results.get(*self.path) is not None

    def jobs(self, results: ResultsFile, place: Place) -> Iterator[Job]:
        """The one job, once what it begins with is kept."""
        if all(results.get(*self._path(name)) and kept_path(place, self.scale, name).exists() for name in self.after):
            folder = kept_folder(place, self.scale, self.model)
            yield Job(self.path, self.work, self.arguments, folder, self.threads)

    def _path(self, model: str) -> Key:
        return self.name, self.scale, model


def rates_root(scale: str, start: str, mixture: str, steps: int, shape: str) -> Key:
    """Where the results of the rates that were tried stand; studies that train alike share them."""
    return "rates", scale, f"{start} on {mixture}", f"{steps} steps", shape


@dataclasses.dataclass(frozen=True)
class Trainings:
    """Runs that begin with the same models, read the same text and are as long.

    Attributes:
      name: key in the results.
      scale: of the models.
      shapes: name of a shape -> name of the shape whose rates it takes; the most telling first.
      steps: of a run that is reported.
      search_steps: of one that rates are chosen with.
      seeds: of the runs that are reported.
      start: the model that they begin with; `{seed}` in it stands for the seed, of rates the first.
      after: of all models that others keep and that it needs, where their results stand, and their names.
      mixture: of texts that they are trained on.
      keep: shapes whose trained models are kept.
      keep_as: under which name, `{shape}` and `{seed}` standing for what they say.
      split: what part of the texts is scored in the end.
      within: what tells results from those of the same study, scale, steps and shape.
    """

    name: str
    scale: Scale
    shapes: Mapping[str, str]
    steps: int
    search_steps: int
    seeds: tuple[int, ...]
    start: str = DENSE
    after: tuple[tuple[Key, str], ...] = ()
    mixture: str = "domains"
    keep: frozenset[str] = frozenset()
    keep_as: str = "{shape}-s{seed}"
    split: str = TEST
    within: str = ""

    @property
    def scale_name(self) -> str:
        return self.scale.name

    @property
    def needs(self) -> tuple[Key, ...]:
        return tuple(path for path, _ in self.after)

    @property
    def keeps(self) -> tuple[Key, ...]:
        return tuple(self.path(shape, seed) for shape in self.keep for seed in self.seeds)

    def path(self, shape: str, seed: int) -> Key:
        """Where a result stands."""
        return self.name, self.scale.name, f"{self.steps} steps{self.within and ', ' + self.within}", shape, str(seed)

    def is_done(self, results: ResultsFile) -> bool:
        """Whether every shape was trained with every seed."""
        return all(results.get(*self.path(shape, seed)) for shape in self.shapes for seed in self.seeds)

    def rates(self, results: ResultsFile, place: Place, shape: str) -> tuple[list[Job], Rates | None]:
        """What must still be tried to choose the rates of a shape; or the choice."""
        root = rates_root(self.scale.name, self.start, self.mixture, self.search_steps, shape)
        tried: dict[Rates, float] = {}
        for text, found in (results.get(*root) or {}).items():
            losses = found.get("losses")
            tried[rates_of(text)] = sum(losses.values()) / len(losses) if losses else float("inf")
        groups = trained_groups(place, self.scale.name, self.start.format(seed=self.seeds[0]), shape)
        missing, chosen = search(groups, _FIRST, tried)
        trials = [Job((*root, text_of(rates)), train_run, {"run": self._trial(shape, rates)}) for rates in missing]
        return trials, chosen

    def jobs(self, results: ResultsFile, place: Place) -> Iterator[Job]:
        """Rates of a shape before its runs."""
        for path, name in self.after:
            if results.get(*path) is None or not kept_path(place, self.scale.name, name).exists():
                return
        for shape, like in self.shapes.items():
            trials, chosen = self.rates(results, place, like)
            yield from trials
            if chosen is None:
                continue
            for seed in self.seeds:
                run = self.run(shape, seed, chosen)
                makes = kept_folder(place, self.scale.name, run.keep) if run.keep else None
                yield Job(self.path(shape, seed), train_run, {"run": run}, makes)

    def run(self, shape: str, seed: int, rates: Rates) -> Run:
        """One that is reported."""
        start = self.start.format(seed=seed)
        keep = self.keep_as.format(shape=shape, seed=seed) if shape in self.keep else ""
        return Run(self.scale.name, shape, self.steps, seed, rates, start, self.mixture, self.split, keep)

    def _trial(self, shape: str, rates: Rates) -> Run:
        start = self.start.format(seed=self.seeds[0])
        return Run(self.scale.name, shape, self.search_steps, RATE_SEED, rates, start, self.mixture, SELECTION)
