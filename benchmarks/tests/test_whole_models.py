"""The comparison of whole models, but for the models that it compares: sizes, scores, plan and report."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from scipy import stats

import moe_jax
from evidence import commands
from evidence.stamp import Stamp
from evidence.studies.probes import TASKS
from evidence.whole_models import scores, study
from evidence.whole_models.entries import BY_LABEL, ENTRIES, OURS, PEERS, WHOLE, size_of
from evidence.whole_models.report import LOSES, UNDECIDED, WINS, Point, more_by_draw, tables, write_report
from evidence.whole_models.scores import _figures
from evidence.whole_models.small_models import TEXTS
from evidence.whole_models.stored import stored_bytes
from evidence.whole_models.study import MODELS, REFUSED, TRAINING, WholeModelsFile, do_entries
from evidence.whole_models.task import DRAWS, SMALL, RefusedError, Task
from tests.support.tiers import long

STAMP = Stamp(commit="1" * 40, date="2026-11-29", machine="x86_64 with 2 threads", versions={"python": "3.11.7"})
FOREVER = float("inf")


@pytest.fixture
def results(tmp_path):
    found = WholeModelsFile(tmp_path, writes=True)
    found._stamp = lambda: STAMP
    return found


def test_what_stands_beside_a_peer_comes_after_it():
    labels = [entry.label for entry in ENTRIES]
    assert len(set(labels)) == len(labels) and WHOLE not in labels
    for place, entry in enumerate(ENTRIES):
        if entry.beside is not None:
            assert labels.index(entry.beside) < place
    for peer in PEERS:
        assert any(entry.beside == size_of(peer) and entry.whose == OURS for entry in ENTRIES)


def test_bytes_are_those_of_tensors(tmp_path):
    tensors = {"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.int8)}
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    assert stored_bytes(tmp_path / "hf") == 3 * 5 * 4 + 7
    model = moe_jax.tiny_model(experts=2)
    saved = moe_jax.save(model, tmp_path / "model")
    assert stored_bytes(saved) == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model.decoder)))


def test_losses_and_divergences_are_those_of_a_reference():
    one, other = (moe_jax.tiny_model(seed=seed).decoder for seed in (0, 1))
    ids = np.random.default_rng(0).integers(0, 64, (2, 9)).astype(np.int32)
    logits = [np.asarray(decoder(ids).logits, np.float64)[:, :-1] for decoder in (one, other)]
    p, q = (each - np.log(np.exp(each).sum(-1, keepdims=True)) for each in logits)
    nll, kl = np.asarray(_figures(other, jnp.asarray(ids), jnp.asarray(p, jnp.float32)))
    np.testing.assert_allclose(nll, -np.take_along_axis(q, ids[:, 1:, None], 2)[..., 0].mean(1), rtol=1e-4)
    np.testing.assert_allclose(kl, (np.exp(p) * (p - q)).sum(-1).mean(1), rtol=1e-3, atol=1e-5)


def _asked(monkeypatch, results, tmp_path, *, refused=(), fingerprint="f", **options):
    """What is done of a model, in order, as labels and draws."""
    done = []

    def measured(task, entry, draw, results):
        label = WHOLE if entry is None else entry.label
        done.append((label, draw))
        if label in refused:
            return {REFUSED: "no such thing"}
        about = {"fingerprint": task.fingerprint, "weights": 80, "experts": 4} if entry is None else {}
        both = {"losses": dict.fromkeys(TEXTS, 1.0), "kl": dict.fromkeys(TEXTS, 0)}
        return {"bytes": 1, "bits_per_weight": 1.0} | both | about

    monkeypatch.setattr(study, "measured", measured)
    monkeypatch.setattr(Task, "fingerprint", fingerprint)
    task = Task("a", tmp_path, tmp_path, tmp_path)
    asked = {"only": None, "draws": len(DRAWS), "until": FOREVER} | options
    return done, do_entries([task], results, **asked)


def test_every_entry_is_done_once_and_further_draws_come_last(monkeypatch, results, tmp_path):
    done, finished = _asked(monkeypatch, results, tmp_path)
    assert finished and done[0] == (WHOLE, 0)
    assert done[1 : len(ENTRIES) + 1] == [(entry.label, 0) for entry in ENTRIES]
    calibrated = [entry.label for entry in ENTRIES if entry.calibrated]
    assert done[len(ENTRIES) + 1 :] == [(label, draw) for draw in DRAWS[1:] for label in calibrated]
    assert _asked(monkeypatch, WholeModelsFile(tmp_path), tmp_path) == ([], True)


def test_what_is_refused_is_asked_for_once_and_nothing_stands_beside_it(monkeypatch, results, tmp_path):
    peer = next(entry for entry in PEERS if entry.calibrated and size_of(entry) == entry.label)
    done, finished = _asked(monkeypatch, results, tmp_path, refused=[peer.label])
    assert finished and [draw for label, draw in done if label == peer.label] == [0]
    assert not {label for label, _ in done} & {entry.label for entry in ENTRIES if entry.beside == peer.label}


def test_what_is_refused_is_in_a_table_of_its_own(results):
    _scored(results, {PEERS[0].label: [np.ones(9)]})
    results.put(MODELS, "a", PEERS[1].label, "0", value={REFUSED: "no such thing"})
    found = tables(results)
    assert _cells(found["refused"], "a") == ["a", PEERS[1].label, "no such thing"]
    assert PEERS[1].label not in found["a"]


def test_it_stops_in_time_and_does_what_is_named(monkeypatch, results, tmp_path):
    assert _asked(monkeypatch, results, tmp_path, until=0.0) == ([], False)
    name = PEERS[0].label
    assert _asked(monkeypatch, results, tmp_path, only=[name]) == ([(WHOLE, 0), (name, 0)], True)


def test_another_training_of_a_model_has_a_whole_model_of_its_own(monkeypatch, results, tmp_path):
    alike, calibrated = PEERS[0].label, next(entry.label for entry in ENTRIES if entry.calibrated)
    some = {"only": [alike, calibrated]}
    assert _asked(monkeypatch, results, tmp_path, **some, draws=1)[0] == [(WHOLE, 0), (alike, 0), (calibrated, 0)]
    done, finished = _asked(monkeypatch, results, tmp_path, **some, fingerprint="g")
    # The codes that need no text are made once of this training, too.
    assert finished and done == [(WHOLE, 0), (alike, 1), (calibrated, 1), (calibrated, 2)]
    # The first draw, which is compared window by window, may be of a training that loses as much as the first.
    other = PEERS[1].label
    results.get(MODELS, "a", WHOLE, "1")["losses"][TEXTS[0]] = 1.01
    assert _asked(monkeypatch, results, tmp_path, only=[other], draws=1, fingerprint="g") == ([], True)
    results.get(MODELS, "a", WHOLE, "1")["losses"][TEXTS[0]] = 1.001
    assert _asked(monkeypatch, results, tmp_path, only=[other], draws=1, fingerprint="g")[0] == [(other, 0)]
    results.forget(MODELS, "a", other)
    wholes = results.get(MODELS, "a", WHOLE)
    assert {number: whole["fingerprint"] for number, whole in wholes.items()} == {"0": "f", "1": "g"}
    runs = results.get(MODELS, "a", calibrated)
    assert {draw: run.get(study.TRAINING) for draw, run in runs.items()} == {"0": None, "1": 1, "2": 1}
    assert _asked(monkeypatch, results, tmp_path, **some) == ([], True)


@pytest.mark.parametrize(("key", "value"), [("experts", 8), ("losses", dict.fromkeys(TEXTS, 1.1))])
def test_results_of_another_model_are_not_gone_on_with(monkeypatch, results, tmp_path, key, value):
    _asked(monkeypatch, results, tmp_path, only=[])
    results.get(MODELS, "a", WHOLE, "0")[key] = value
    with pytest.raises(SystemExit, match="of another model"):
        _asked(monkeypatch, results, tmp_path, fingerprint="g")


def test_what_is_added_is_that_over_the_whole_model_of_its_training(results):
    _scored(results, {PEERS[0].label: [np.full(9, 0.5)], PEERS[1].label: [np.full(9, 0.5)]})
    before = tables(results)["a"]
    whole = results.get(MODELS, "a", WHOLE, "0")
    other = json.loads(json.dumps(whole))
    run = results.get(MODELS, "a", PEERS[1].label, "0")
    for text in TEXTS:
        for one in (other, run):
            one["losses"][text] += 0.002
            one["window_losses"][text] = [loss + 0.002 for loss in one["window_losses"][text]]
    results.put(MODELS, "a", WHOLE, "1", value=other)
    assert tables(results)["a"] != before
    run[study.TRAINING] = 1
    assert tables(results)["a"] == before


def test_draws_of_several_trainings_are_compared_within_each(results):
    label = PEERS[0].label
    assert not PEERS[0].calibrated
    ours = f"allocate, bytes of {label}"
    _scored(results, {label: [np.full(9, 2.0), np.full(9, 2.5)], ours: [np.full(9, 1.5), np.full(9, 2.25)]})
    results.put(MODELS, "a", WHOLE, "1", value=results.get(MODELS, "a", WHOLE, "0"))
    start = f"{PEERS[0].whose}: {label}"
    assert _cells(tables(results)["a, against"], start)[5] == "-0.5000, +0.2500"
    for entry in (label, ours):
        results.get(MODELS, "a", entry, "1")[study.TRAINING] = 1
    assert _cells(tables(results)["a, against"], start)[5] == "-0.5000, -0.2500"


def test_a_peer_without_an_allocation_of_its_bytes_stands_beside_the_largest_smaller_one(results):
    peers = [peer for peer in PEERS if size_of(peer) == peer.label][:3]
    names = [f"allocate, bytes of {peer.label}" for peer in peers]
    _scored(results, {name: [np.ones(9)] for name in (peers[2].label, *names[:2])})
    for label, bits in ((peers[2].label, 5.0), (names[0], 4.5), (names[1], 5.5)):
        results.get(MODELS, "a", label, "0")["bits_per_weight"] = bits
    assert _cells(tables(results)["a, against"], f"{peers[2].whose}: {peers[2].label}")[1:4] == [
        "5.000",
        "allocate",
        "4.500",
    ]


def test_prompts_are_stretches_of_windows_each_once(monkeypatch, tmp_path):
    windows = {name: np.arange(2 * 256).reshape(2, 256) + 1000 * number for number, name in enumerate(TEXTS)}
    asked = []

    def generate(model, prompts, *, max_new_tokens):
        asked.extend(map(tuple, prompts))
        return [SimpleNamespace(ids=prompt) for prompt in prompts]

    monkeypatch.setattr(scores, "_windows", lambda task: windows)
    monkeypatch.setattr(moe_jax, "generate", generate)
    monkeypatch.setattr(Task, "sizes", dataclasses.replace(SMALL, prompts=40))
    found = scores._continued(Task("a", tmp_path, tmp_path, tmp_path), None)
    assert len(set(asked)) == len(found) == 40 and {len(prompt) for prompt in asked} == {scores.PROMPT}
    assert asked[0] == tuple(windows[TEXTS[0]][0, :32]) and asked[6] == tuple(windows[TEXTS[0]][0, 32:64])


def test_a_refusal_has_a_reason_without_paths_and_a_signal_has_none(monkeypatch, tmp_path):
    task = Task("a", tmp_path / "model", tmp_path, tmp_path / "work")
    with pytest.raises(RefusedError) as refused:
        task.command("compress", task.model, task.work / "entry", "--method", "quantize", "--bits", 4)
    assert "model" in str(refused.value) and str(tmp_path) not in str(refused.value)
    monkeypatch.setattr(commands, "main", lambda words: 143)
    with pytest.raises(SystemExit):
        task.command("compress")


@long
def test_options_of_ours_go_together(monkeypatch, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "text.txt").write_text("a text")
    monkeypatch.setattr(Task, "sizes", SMALL)
    monkeypatch.setattr(Task, "text", tmp_path / "text.txt")
    task = Task("a", tmp_path / "nowhere", tmp_path, tmp_path / "work")
    for entry in ENTRIES:
        if entry.whose == OURS:
            with pytest.raises(RefusedError, match="no model at"):
                entry.make(task, task.work / "entry", 1, 10_000 if entry.beside else 0)


def _scored(results, losses):
    """Puts results of a model whose losses of windows are given by entry and draw."""
    results.forget(MODELS, "a", WHOLE)
    sizes = {"windows": 3, "length": 8, "prompts": 2, "samples": 2, "seq_len": 8}
    about = {"weights": 80, "experts": 4, "sizes": sizes}
    for label, by_draw in ({WHOLE: [np.ones(9)]} | losses).items():
        for draw, windows in enumerate(by_draw):
            by_text = {name: list(own) for name, own in zip(TEXTS, np.reshape(windows, (3, 3)), strict=True)}
            run = {
                **(about if label == WHOLE else {}),
                "bytes": 20,
                "bits_per_weight": 2.0,
                "losses": {name: float(np.mean(own)) for name, own in by_text.items()},
                "kl": dict.fromkeys(TEXTS, 0.5),
            }
            if draw == 0:
                run |= {"window_losses": by_text, "same_until": [16, 32], "agreement": {"until_first": 0.75}}
                run["window_kl"] = {name: [2 * loss for loss in own] for name, own in by_text.items()}
                run["answers"] = (
                    {"piqa": "1100", "arc_easy": "1111"} if label == WHOLE else dict.fromkeys(TASKS, "1000")
                )
            results.put(MODELS, "a", label, str(draw), value=run)
    return results


def _cells(table, start):
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


@pytest.mark.parametrize(("shift", "said"), [(-0.5, WINS), (0.5, LOSES), (0.0, UNDECIDED)])
def test_ours_are_held_against_a_peer_window_by_window(results, shift, said):
    rng = np.random.default_rng(1)
    theirs = 1 + rng.random(9)
    ours = theirs + shift + 0.1 * np.tile([-1, 0, 1], 3)
    label = PEERS[0].label
    _scored(results, {label: [theirs], f"allocate, bytes of {label}": [ours, ours + 0.25]})
    cells = _cells(tables(results)["a, against"], f"{PEERS[0].whose}: {label}")
    low, high = stats.t.interval(0.95, 8, loc=shift, scale=np.std(ours - theirs, ddof=1) / 3)
    found = [float(number.strip("[],")) for number in cells[4].split()]
    np.testing.assert_allclose(found, [shift, low, high], atol=6e-5)
    assert cells[5] == f"{shift:+.4f}, {shift + 0.25:+.4f}" and cells[-2:] == [said, said]
    assert float(cells[8].split()[0]) == pytest.approx(2 * shift, abs=6e-5)


def test_later_draws_stand_beside_those_of_the_same_training():
    runs = ({"0": (1.0, 0), "1": (2.0, 2), "2": (4.0, 2)}, {"0": (1.5, 1), "1": (2.75, 2), "2": (5.0, 1)})
    one, other = (
        Point(
            BY_LABEL[f"{bits} bits, calibrated"],
            {draw: {"losses": {"wiki": loss}, TRAINING: training} for draw, (loss, training) in own.items()},
        )
        for bits, own in zip((4, 3), runs, strict=True)
    )
    assert more_by_draw(one, other, "losses") == "-0.5000, -0.7500"


def test_an_entry_stands_beside_what_lacks_one_step(results):
    step = next(entry for entry in ENTRIES if entry.without)
    _scored(results, {step.label: [np.full(9, 1.5), np.full(9, 1.25)], step.without: [np.full(9, 1.75)]})
    cells = _cells(tables(results)["a, every step"], step.label)
    by_draw = "" if BY_LABEL[step.without].calibrated else "-0.2500, -0.5000"
    assert cells[2] == step.without and cells[4].startswith("-0.2500") and cells[5] == by_draw
    assert cells[6].startswith("-0.5000")
    labels = [entry.label for entry in ENTRIES]
    assert all(entry.without in labels for entry in ENTRIES if entry.without)


def test_answers_are_held_against_those_of_the_whole_model(results):
    _scored(results, {PEERS[0].label: [np.ones(9)]})
    table = tables(results)["a, questions"]
    assert "piqa, % right of 4 [95 %]" in table
    assert _cells(table, WHOLE)[2].startswith("50.0 [") and _cells(table, WHOLE)[-1] == ""
    cells = _cells(table, f"{PEERS[0].whose}: {PEERS[0].label}")
    assert cells[2].startswith("25.0 [") and cells[4].startswith("-50.0 [")


@long
def test_the_report_has_all_entries_by_bytes(results, tmp_path):
    losses = {entry.label: [np.full(9, 1.25)] for entry in ENTRIES}
    text = write_report(_scored(results, losses), tmp_path)
    assert (tmp_path / "whole_models.md").read_text() == text and (tmp_path / "whole_models.png").exists()
    for entry in ENTRIES:
        cells = _cells(tables(results)["a"], f"{entry.whose}: {entry.label}")
        assert cells[1:3] == ["0.00", "2.000"] and cells[6].startswith("+0.2500") and cells[-1].startswith("75.0 [")
    json.loads((tmp_path / "whole_models.json").read_text())
