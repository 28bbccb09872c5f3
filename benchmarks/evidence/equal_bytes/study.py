"""The comparison as a study of jobs."""

import dataclasses
from collections.abc import Iterator

from evidence.equal_bytes.comparison_job import Asked, compare
from evidence.equal_bytes.entries import COMPARISON, DRAWS, ENTRIES, UNCOMPRESSED, Entry
from evidence.equal_bytes.models import Subject
from evidence.results import Key, ResultsFile
from evidence.studies.jobs import Job, Place
from evidence.studies.probes import Probes
from evidence.studies.training_job import kept_path
from evidence.studies.trainings import Kept


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All entries on one model.

    Attributes:
      subject: the model; it is waited for, see `own_models`.
      draws: of the calibration text, for calibrated entries.
      probes: what compressed models are asked beside the loss, with the first draw.
      questioned: entries that are asked its questions; None: all.
      entries: what is done to it.
      more_draws: those that are done with every draw; None: all calibrated ones.
    """

    subject: Subject
    draws: tuple[int, ...] = DRAWS
    probes: Probes | None = None
    questioned: tuple[Entry, ...] | None = None
    entries: tuple[Entry, ...] = ENTRIES
    more_draws: tuple[Entry, ...] | None = None

    name = COMPARISON
    keeps = ()

    @property
    def needs(self) -> tuple[Key, ...]:
        return ((Kept.name, self.subject.scale, self.subject.model),)

    @property
    def scale_name(self) -> str:
        return self.subject.scale

    def is_done(self, results: ResultsFile) -> bool:
        """Whether every entry is done with every draw."""
        return all(results.get(*self.path(label, draw)) is not None for label, draw, _ in self._asked())

    def path(self, label: str, draw: int) -> Key:
        """Where a result stands."""
        return self.name, self.subject.scale, self.subject.label, label, str(draw)

    def jobs(self, results: ResultsFile, place: Place) -> Iterator[Job]:
        """The model as it is, then every entry with the first draw, and then with the others."""
        made = all(results.get(*key) is not None for key in self.needs)
        if made and kept_path(place, self.subject.scale, self.subject.model).exists():
            for label, draw, asked in self._asked():
                yield Job(self.path(label, draw), compare, {"asked": asked})

    def _asked(self) -> Iterator[tuple[str, int, Asked]]:
        """Every result: what it is of, and the draw."""
        yield UNCOMPRESSED, 0, Asked(self.subject, None, probes=self.probes)
        for draw in self.draws:
            again = self.entries if self.more_draws is None else self.more_draws
            for entry in self.entries if draw == self.draws[0] else again:
                if draw == self.draws[0] or entry.calibrated:
                    probes = self._probes(entry) if draw == self.draws[0] else None
                    yield entry.label, draw, Asked(self.subject, entry, draw, probes)

    def _probes(self, entry: Entry) -> Probes | None:
        if self.probes is None or self.questioned is None or entry in self.questioned:
            return self.probes
        return dataclasses.replace(self.probes, questions=0)
