"""The comparison at equal bytes, but for the models that it compares: what it plans and what it reports."""

import json

import numpy as np
import pytest

from evidence.equal_bytes.aims import aims
from evidence.equal_bytes.entries import ABLATIONS, DRAWS, ENTRIES, RECOVERIES, UNCOMPRESSED
from evidence.equal_bytes.models import Subject
from evidence.equal_bytes.own_models import adopt, own_models
from evidence.equal_bytes.plan import comparisons
from evidence.equal_bytes.report import ablations, blocks, permutations, recoveries, tables, write_report
from evidence.equal_bytes.study import Comparison
from evidence.results import RESULTS, NoSettings, ResultsFile
from evidence.stamp import Stamp
from evidence.studies.claims_file import ClaimsFile
from evidence.studies.jobs import MADE, DiffersError, Place, open_jobs
from evidence.studies.probes import Probes
from evidence.studies.rates import text_of
from evidence.studies.training_job import kept_folder, kept_path
from evidence.studies.trainings import Kept
from moe_jax.compression import make_method

STAMP = Stamp(commit="1" * 40, date="2026-11-23", machine="x86_64 with 2 threads", versions={"python": "3.11.7"})


@pytest.fixture
def results(tmp_path):
    return ResultsFile(tmp_path / "equal_bytes.json", NoSettings(), stamp=lambda: STAMP)


def test_every_entry_is_a_method_with_its_options():
    every = [*ENTRIES, *(recovered for _, recovered in RECOVERIES)]
    for entry in every:
        make_method(entry.method, dict(entry.options))
    assert len({entry.label for entry in every}) == len(every)
    labels = {entry.label for entry in ENTRIES}
    assert all(entry.label in labels for entry, _ in RECOVERIES)
    assert all(entry.label in labels for steps in ABLATIONS.values() for _, entry in steps)


def _keep(results: ResultsFile, place: Place) -> None:
    results.put(Kept.name, "stories260K", "a", value={"steps": 1})
    kept_path(place, "stories260K", "a").mkdir(parents=True)


def test_only_calibrated_entries_are_done_for_every_draw(results, tmp_path):
    place, study = Place(tmp_path, tmp_path), Comparison(Subject("stories260K", "a"))
    assert not list(study.jobs(results, place)) and not study.is_done(results)  # the model is not there
    _keep(results, place)
    paths = [job.path for job in study.jobs(results, place)]
    assert len(set(paths)) == len(paths)
    for entry in ENTRIES:
        done = [path for path in paths if path[3] == entry.label]
        assert len(done) == (len(DRAWS) if entry.calibrated else 1)


def test_only_what_is_asked_for_is_done_with_further_draws(results, tmp_path):
    calibrated = [entry for entry in ENTRIES if entry.calibrated]
    study = Comparison(Subject("stories260K", "a"), more_draws=(calibrated[0],))
    _keep(results, Place(tmp_path, tmp_path))
    paths = [job.path for job in study.jobs(results, Place(tmp_path, tmp_path))]
    further = {path[3] for path in paths if path[4] != "0"}
    assert further == {calibrated[0].label} and len(paths) == 1 + len(ENTRIES) + len(DRAWS) - 1


def test_only_some_are_asked_questions_and_only_with_the_first_draw(results, tmp_path):
    asked, other = [entry for entry in ENTRIES if entry.calibrated][:2]
    study = Comparison(Subject("stories260K", "a"), probes=Probes(3, 5), questioned=(asked,), entries=(asked, other))
    _keep(results, Place(tmp_path, tmp_path))
    probes = {job.path[3:]: job.arguments["asked"].probes for job in study.jobs(results, Place(tmp_path, tmp_path))}
    assert probes[UNCOMPRESSED, "0"] == probes[asked.label, "0"] == Probes(3, 5)
    assert probes[other.label, "0"] == Probes(0, 5) and probes[asked.label, "1"] is None


def test_steps_and_recoveries_are_reported_beside_what_they_change(results):
    study = Comparison(Subject("stories260K", "a"))
    losses = {"code": 1.0}
    results.put(*study.path(UNCOMPRESSED, 0), value={"losses": losses, "kl": {"code": 0.0}})
    (before, recovered), *_ = RECOVERIES
    (_, first), (_, second), *_ = ABLATIONS["2 bits"]
    for entry, loss in ((before, 1.3), (recovered, 1.2), (first, 1.5), (second, 1.6)):
        value = {
            "losses": {"code": loss},
            "kl": {"code": 0.0},
            "bits_per_weight": 2.0,
            "selection_losses": {"code": loss},
        }
        results.put(*study.path(entry.label, 0), value=value)
    (table,) = recoveries(results).values()
    assert table.index("+0.3000") < table.index("+0.2000")
    (table,) = ablations(results).values()
    assert table.index("+0.5000") < table.index("+0.6000")


@pytest.fixture(scope="module")
def claims():
    return ClaimsFile(RESULTS)


def test_ours_is_chosen_by_the_selection_text_and_compared_by_the_test_text(results):
    study, windows = Comparison(Subject("stories260K", "a")), np.linspace(1.0, 2.0, 8)

    def put(label: str, bits: float, selection: float, test: float, more: np.ndarray | float = 0.0) -> None:
        found = {"losses": {"code": test}, "selection_losses": {"code": selection}, "kl": {"code": 0.0}}
        found["window_losses"] = {"code": (windows + test + more).tolist()}
        results.put(*study.path(label, 0), value={**found, "bits_per_weight": bits})

    put(UNCOMPRESSED, 16.0, 1.0, 1.0)
    put("GPTQ, 2 bits", 2.2, 1.4, 1.5)
    put("shared centre, GPTQ, 4 + 1 bits", 2.0, 1.3, 1.4, np.array([0.01, -0.01] * 4))
    put("shared centre, GPTQ, 3 + 1 bits", 1.8, 1.35, 1.2)  # better on the test text, which does not choose
    put("shared centre, GPTQ, 4 + 2 bits", 2.8, 1.1, 1.1)  # too large
    (table,) = aims(results).values()
    (row,) = [line.split(" | ") for line in table.splitlines() if "2 bits | 2.20" in line]
    assert row[2] == "+0.5000" and row[3] == "shared centre, GPTQ, 4 + 1 bits (2.00)"
    assert row[4].startswith("-0.1000 [-0.1") and row[5] == "shared centre, GPTQ, 3 + 1 bits (1.80)"
    assert row[6].startswith("-0.3000")


def test_permuted_models_stand_beside_what_they_were(results):
    entry = next(entry for entry in ENTRIES if entry.calibrated)
    for permuted, loss in ((False, 1.25), (True, 1.5)):
        study = Comparison(Subject("stories260K", "a", permuted=permuted))
        found = {"losses": {"code": 1.0}, "selection_losses": {"code": 1.0}, "kl": {"code": 0.0}}
        results.put(*study.path(UNCOMPRESSED, 0), value=found)
        found = {**found, "losses": {"code": loss}, "bits_per_weight": 2.0}
        results.put(*study.path(entry.label, 0), value=found)
    (table,) = permutations(results).values()
    assert "| 2.00 | +0.2500 | +0.5000 | +0.2500 |" in table
    assert not any(name.endswith("permuted") for name in blocks(results) if "neurons" not in name)


def test_models_are_trained_with_the_rates_of_claims_and_after_what_they_begin_with(
    claims, results, data_dir, tmp_path
):
    place = Place(data_dir, tmp_path)
    models = own_models([study.subject for study in comparisons()], place, claims)
    names = [(model.scale, model.model) for model in models]
    assert len(set(names)) == len(names) == 7  # not SmolLM2's: where it is, was not said
    mixed = next(model for model in models if model.model == "experts from models-s0")
    assert mixed.after == ("code-s0", "math-s0", "wiki-s0")
    assert all(names.index((mixed.scale, name)) < names.index((mixed.scale, mixed.model)) for name in mixed.after)
    run = mixed.arguments["run"]
    assert (run.seed, run.keep) == (0, mixed.model)
    groups = [group for group, _ in run.rates]
    assert groups == ["base", "router", "experts"]
    assert claims.get(
        "rates", "stories260K", "dense on domains", "250 steps", "experts from models", text_of(run.rates)
    )
    assert not list(mixed.jobs(results, place))  # waits
    first = models[names.index((mixed.scale, "code-s0"))]
    assert [job.path for job in first.jobs(results, place)] == [("models", "stories260K", "code-s0")]


def test_a_model_of_another_program_is_taken_once(claims, results, data_dir, tmp_path):
    place = Place(data_dir, tmp_path)
    (model,) = own_models([Subject("stories260K", "vanilla-s0")], place, claims)
    adopt([model], results, place)
    assert not model.is_done(results)
    folder = kept_folder(place, model.scale, model.model)
    folder.mkdir(parents=True)
    (folder / MADE).write_text(json.dumps({"losses": {"code": 2.0}}))
    adopt([model], results, place)
    assert model.is_done(results) and not list(open_jobs([model], results, place))
    (folder / MADE).write_text(json.dumps({"losses": {"code": 2.5}}))
    adopt([model], results, place)
    with pytest.raises(DiffersError, match="another run"):
        list(open_jobs([model], results, place))


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
        results.put(
            *study.path(entry.label, draw), value={**found, "selection_losses": losses, "bits_per_weight": 4.126}
        )
    (table,) = tables(results).values()
    assert f"{np.mean((0.1, 0.2, 0.3)):+.4f} ± {np.std((0.1, 0.2, 0.3), ddof=1):.4f}" in table
    assert "| 4.13 |" in table and "added to 2.0000 nats" in table
    write_report(results, tmp_path)
    assert (tmp_path / "equal_bytes.png").stat().st_size > 1000
