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


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All entries on one model.

    Attributes:
      subject: the model; it is waited for.
      draws: of the calibration text, for calibrated entries.
      probes: what compressed models are asked beside the loss, with the first draw.
      entries: what is done to it.
      more_draws: those that are done with every draw; None: all calibrated ones.
    """

    subject: Subject
    draws: tuple[int, ...] = DRAWS
    probes: Probes | None = None
    entries: tuple[Entry, ...] = ENTRIES
    more_draws: tuple[Entry, ...] | None = None

    name = COMPARISON
    # `equal_bytes.py` begins with models that another program keeps.
    needs = keeps = ()

    @property
    def scale_name(self) -> str:
        return self.subject.scale

    def is_done(self, results: ResultsFile) -> bool:
        """Asked of studies that keep models or begin with those of others; this one does neither."""
        del results
        return True

    def path(self, label: str, draw: int) -> Key:
        """Where a result stands."""
        return self.name, self.subject.scale, self.subject.label, label, str(draw)

    def jobs(self, results: ResultsFile, place: Place) -> Iterator[Job]:
        """The model as it is, then every entry with the first draw, and then with the others."""
        del results
        if not kept_path(place, self.subject.scale, self.subject.model).exists():
            return
        yield Job(self.path(UNCOMPRESSED, 0), compare, {"asked": Asked(self.subject, None, probes=self.probes)})
        for draw in self.draws:
            again = self.entries if self.more_draws is None else self.more_draws
            for entry in self.entries if draw == self.draws[0] else again:
                if draw == self.draws[0] or entry.calibrated:
                    probes = self.probes if draw == self.draws[0] else None
                    asked = Asked(self.subject, entry, draw, probes)
                    yield Job(self.path(entry.label, draw), compare, {"asked": asked})
