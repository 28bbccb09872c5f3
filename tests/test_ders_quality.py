"""What `benchmarks/ders_quality.py` keeps between runs, and what it makes of it. It trains nothing here."""

import pathlib
import sys
import types

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))

from ders import compression  # noqa: E402
from ders.report import write_report  # noqa: E402
from ders.results import Results  # noqa: E402
from ders.settings import BASES, DENSE, FROZEN, NO_DELTAS, VANILLA, Settings  # noqa: E402

LOSSES = {DENSE: (2.7, 2.9), VANILLA: (2.6, 2.7), "DeRS-LM r=4": (2.65, 2.75), "DeRS-LM r=4" + FROZEN: (2.75, 2.95)}
PARAMS = {DENSE: 1000, VANILLA: 4000, "DeRS-LM r=4": 1200, "DeRS-LM r=4" + FROZEN: 1200}


@pytest.fixture
def results(tmp_path: pathlib.Path) -> Results:
    """Two seeds of some kinds, and compressions of vanilla."""
    results = Results(tmp_path / "results.json", Settings())
    for kind, losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            run = {"loss": loss, "start_loss": 5.0, "params": PARAMS[kind]}
            results.put("training", kind, str(seed), value=run)
    for base in BASES:
        for seed in ("0", "1"):
            run = {"added_loss": 0.25, "expert_bytes_before": 400, "expert_bytes_after": 120, "cosine_mean": [0.8]}
            results.put("compression", base, "drop", "0.9", seed, value=run)
            results.put("compression", base, "no deltas", "", seed, value={"added_loss": 0.5})
    return results


def test_what_was_done_is_known_after_a_kill(results, tmp_path: pathlib.Path):
    again = Results(tmp_path / "results.json", Settings())
    assert again.get("training", VANILLA, "1")["loss"] == 2.7
    assert again.get("training", VANILLA, "2") is None and again.get("training", "no such kind") is None
    assert again.made() == results.made() and len(again.made()) == 1


def test_results_of_other_settings_are_not_mixed(results, tmp_path: pathlib.Path):
    with pytest.raises(SystemExit, match="other settings .steps 200 there, 7 here."):
        Results(tmp_path / "results.json", Settings(steps=7))
    assert Results(tmp_path / "results.json", None).settings == Settings()
    with pytest.raises(SystemExit, match="no results at"):
        Results(tmp_path / "absent.json", None)


def test_differences_are_taken_seed_by_seed(results, tmp_path: pathlib.Path):
    lines = write_report(results, tmp_path).splitlines()
    # The losses spread by 0.07 around their means, the differences do not.
    assert "| dense | 0 | 2.8000 ± 0.1414 | +0.1500 ± 0.0707 |  |  |" in lines
    assert "| vanilla | 3,000 | 2.6500 ± 0.0707 |  |  |  |" in lines
    expected = "| DeRS-LM r=4 | 200 | 2.7000 ± 0.0707 | +0.0500 ± 0.0000 | 2.8500 ± 0.1414 | +0.1500 ± 0.0707 |"
    assert expected in lines
    assert "| drop 0.9, random | 30% | +0.2500 ± 0.0000 | +0.2500 ± 0.0000 |" in lines
    assert "| no deltas | 25% | +0.5000 ± 0.0000 | +0.5000 ± 0.0000 |" in lines
    # 0.9 / 0.1 times 1 - 0.8².
    assert "| 0.9 | 3.2400 | 0.1 | 3.2400 | 0.1 |" in lines
    assert (tmp_path / "ders_quality.md").read_text().splitlines() == lines
    for name in ("training", "compression"):
        assert (tmp_path / f"ders_quality_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_not_there_yet_is_left_out(tmp_path: pathlib.Path):
    results = Results(tmp_path / "results.json", Settings())
    results.put("training", VANILLA, "0", value={"loss": 2.6, "start_loss": 5.0, "params": 4000})
    assert write_report(results, tmp_path) == "\n"
    assert not list(tmp_path.glob("*.png"))


def test_another_model_is_not_compressed_into_old_results(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    task = types.SimpleNamespace(
        held_out=None, settings=types.SimpleNamespace(seq_len=8), seeds=[0], vanilla=lambda seed: tmp_path, dense=None
    )
    monkeypatch.setattr(compression, "Scorer", lambda *_: lambda model: 2.75)
    for name in ("load_model", "ModelDirectory", "without_deltas"):
        monkeypatch.setattr(compression, name, lambda *_: None)
    monkeypatch.setattr(compression, "METHODS", {NO_DELTAS: ("",)})
    results = Results(tmp_path / "results.json", Settings())
    results.put("training", VANILLA, "0", value={"loss": 9.0})
    compression.compress_models(task, results)
    # Against the model that was compressed, not against that of the training table.
    assert results.get("compressed", "0") == {"loss": 2.75}
    assert results.get("compression", BASES[0], NO_DELTAS, "", "0")["added_loss"] == 0.0
    results.put("compressed", "0", value={"loss": 2.7})
    with pytest.raises(SystemExit, match="held-out loss 2.750000, that of the results had 2.700000"):
        compression.compress_models(task, results)
