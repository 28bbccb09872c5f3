"""The comparison at equal bytes, but for the models that it compares: what it plans and what it reports."""

import pathlib
import sys

import numpy as np
import pytest

from moe_jax.compress import make_method

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from evidence.equal_bytes.entries import DRAWS, ENTRIES, UNCOMPRESSED  # noqa: E402
from evidence.equal_bytes.models import Subject  # noqa: E402
from evidence.equal_bytes.plan import comparisons  # noqa: E402
from evidence.equal_bytes.report import tables, write_report  # noqa: E402
from evidence.equal_bytes.study import Comparison  # noqa: E402
from evidence.results import NoSettings, ResultsFile  # noqa: E402
from evidence.stamp import Stamp  # noqa: E402
from evidence.studies.jobs import Place  # noqa: E402
from evidence.studies.training_job import kept_path  # noqa: E402

STAMP = Stamp(commit="1" * 40, date="2026-11-23", machine="x86_64 with 2 threads", versions={"python": "3.11.7"})


@pytest.fixture
def results(tmp_path):
    return ResultsFile(tmp_path / "equal_bytes.json", NoSettings(), stamp=lambda: STAMP)


def test_every_entry_is_a_method_with_its_options():
    for entry in ENTRIES:
        make_method(entry.method, dict(entry.options))
    assert len({entry.label for entry in ENTRIES}) == len(ENTRIES)


def test_only_calibrated_entries_are_done_for_every_draw(results, tmp_path):
    place, study = Place(tmp_path, tmp_path), Comparison(Subject("stories260K", "a"))
    assert not list(study.jobs(results, place))  # the model is not there
    kept_path(place, "stories260K", "a").mkdir(parents=True)
    paths = [job.path for job in study.jobs(results, place)]
    assert len(set(paths)) == len(paths)
    for entry in ENTRIES:
        done = [path for path in paths if path[3] == entry.label]
        assert len(done) == (len(DRAWS) if entry.calibrated else 1)


def test_models_are_named_apart():
    labels = [(study.subject.scale, study.subject.label) for study in comparisons()]
    assert len(set(labels)) == len(labels)


def test_the_report_says_what_was_added_to_the_loss_of_the_model(results, tmp_path):
    study = Comparison(Subject("stories260K", "a"))
    losses = {"code": 1.0, "math": 2.0, "wiki": 3.0}
    results.put(*study.path(UNCOMPRESSED, 0), value={"losses": losses, "kl": dict.fromkeys(losses, 0.0)})
    entry = next(entry for entry in ENTRIES if entry.calibrated)
    for draw, added in zip(DRAWS, (0.1, 0.2, 0.3), strict=True):
        found = {"losses": {name: loss + added for name, loss in losses.items()}, "kl": dict.fromkeys(losses, added)}
        results.put(*study.path(entry.label, draw), value={**found, "bits_per_weight": 4.126})
    (table,) = tables(results).values()
    assert f"{np.mean((0.1, 0.2, 0.3)):+.4f} ± {np.std((0.1, 0.2, 0.3), ddof=1):.4f}" in table
    assert "| 4.13 |" in table and "added to 2.0000 nats" in table
    write_report(results, tmp_path)
    assert (tmp_path / "equal_bytes.png").stat().st_size > 1000
