"""What `benchmarks/resmoe_quality.py` makes of its results. It trains and compresses nothing here."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))

from resmoe.likeness import cosines, least_error_per_neuron  # noqa: E402
from resmoe.report import write_report  # noqa: E402
from resmoe.results import Results  # noqa: E402
from resmoe.settings import Settings  # noqa: E402
from resmoe.summary import Point, frontier, within  # noqa: E402
from resmoe.variants import BASELINE, PLAIN, PUBLISHED, REFITTED, RESMOE, VARIANTS  # noqa: E402

ORIGIN = "random-e8"
# eps / f of both seeds, loss, and bytes of experts that had 1000 parameters.
RUNS = {
    (REFITTED, 0.25): ((0.14, 0.21), 1.2, 1000),
    (PUBLISHED, 0.25): ((0.2, 0.3), 1.3, 1000),
    ("average + UP", 0.25): ((0.28, 0.42), 1.3, 1000),
    ("UP", 0.25): ((0.4, 0.5), 1.5, 800),
    ("SP", 0.25): ((0.9, 1.0), 60.0, 500),
    ("plain quantisation", 8): ((0.01, 0.01), 1.1, 1125),
    ("plain quantisation", 4): ((0.02, 0.02), 1.15, 625),
}


@pytest.fixture
def results(tmp_path: pathlib.Path) -> Results:
    results = Results(tmp_path / "results.json", Settings())
    for seed in ("0", "1"):
        model = {"loss": 1.0, "expert_params": 1000, "cosine": [0.0], "matched_cosine": [0.25], "squared_norm": [8.0]}
        results.put("models", ORIGIN, seed, value=model)
        for (name, value), (errors, loss, nbytes) in RUNS.items():
            run = {
                "error_per_neuron": [errors[int(seed)]],
                "least_error_per_neuron": [errors[int(seed)] * (1.25 if name == "SP" else 1.0)],
                "objective": [6.0],
                "loss": loss,
                "served_loss": loss + 1e-5,
                "expert_bytes_after": nbytes,
            }
            results.put("compression", ORIGIN, name, f"{value:g}", seed, value=run)
    return results


def test_tables_show_means_over_seeds(results, tmp_path: pathlib.Path):
    lines = write_report(results, tmp_path).splitlines()
    assert f"| {ORIGIN} | 2.718 ± 0.000 | 0.000 ± 0.000 | 0.250 ± 0.000 | 75.0 ± 0.0 |" in lines
    assert "| uncompressed | 0 | 2.718 ± 0.000 | 16 |" in lines
    assert "| ResMoE UP | 0.1750 ± 0.0495 | 3.320 ± 0.000 | 8.00 |" in lines
    assert "| SP | 0.9500 ± 0.0707 | 1e+09 ± 0 | 4.00 |" in lines
    # 30 % with either seed: taken seed by seed, though the errors differ between seeds.
    assert (
        f"| {ORIGIN} | concat | 0.2500 ± 0.0707 | 0.1750 ± 0.0495 | 30.0 ± 0.0 | 3.669 ± 0.000 | 3.320 ± 0.000 |"
        in lines
    )
    assert (tmp_path / "resmoe_quality.md").read_text().splitlines() == lines
    for name in ("curve", "bytes"):
        assert (tmp_path / f"resmoe_quality_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_findings_follow_the_numbers(results, tmp_path: pathlib.Path):
    text = write_report(results, tmp_path)
    said = "eps/f: lower than every baseline, as expected: ResMoE UP (0.175) against UP (0.45), lower with 2 of 2 seed"
    assert said in text
    assert f"- {ORIGIN}: with the barycenter as centre eps/f is 50.0 ± 0.0 % lower than with the average." in text
    assert "lowers the squared error by 30.0%, as expected (20% to 40%)." in text
    assert "- at the bytes of 8-bit quantisation (9.00 bits per weight): plain quantisation is better, 3.004" in text
    assert "- at the bytes of 4-bit quantisation (5.00 bits per weight): no form of ResMoE that was tried fits." in text
    said = "at the bytes of ResMoE UP, keep 0.25 (8.00 bits per weight): 3.320, 4.482 with UP, keep 0.25, 3.158 with"
    assert said in text
    assert "14 were also scored as they are served: the losses differ by at most 1e-05 nats." in text
    assert "what the method itself says. But for SP (1.25 times): " in text
    for seed in ("0", "1"):
        better = results.get("compression", ORIGIN, "UP", "0.25", seed) | {"error_per_neuron": [0.1]}
        results.put("compression", ORIGIN, "UP", "0.25", seed, value=better)
        refitted = results.get("compression", ORIGIN, REFITTED, "0.25", seed) | {"error_per_neuron": [0.19]}
        results.put("compression", ORIGIN, REFITTED, "0.25", seed, value=refitted)
    text = write_report(results, tmp_path)
    assert "**against the expectation a baseline is lowest**: ResMoE UP (0.19) against UP (0.1), lower with 0" in text
    assert "The centre leaves 75 ± 0 % of the squared norm" in text


def test_what_is_not_there_yet_is_left_out(tmp_path: pathlib.Path):
    assert write_report(Results(tmp_path / "results.json", Settings()), tmp_path) == "\n"
    assert not list(tmp_path.glob("*.png"))


def test_frontier_and_budget():
    def point(name: str, bits: float, error: float, perplexity: float) -> Point:
        return Point(name, VARIANTS[name].main_value, bits, error, (perplexity,))

    ours, plain = point(REFITTED, 8.0, 0.3, 3.0), point("plain quantisation", 5.0, 0.3, 3.0)
    dear = point(PUBLISHED, 9.0, 0.2, 2.0)
    assert frontier([ours, plain, dear]) == [plain, dear]
    assert within([ours, plain, dear], RESMOE, 8.5) == ours and within([ours, plain, dear], RESMOE, 5.0) is None
    assert within([ours, plain, dear], PLAIN, 5.0) == plain


def test_of_resmoe_nothing_is_chosen_by_the_text_that_is_scored():
    lucky = Point(PUBLISHED, 0.25, 8.0, 0.4, (1.0,))
    ours = Point(REFITTED, 0.25, 8.0, 0.3, (3.0,))
    assert within([lucky, ours], RESMOE, 8.0) == ours
    assert frontier([lucky, ours]) == [ours]
    # What it is compared with is taken at its best.
    weak, strong = Point("UP", 0.25, 5.0, 0.3, (9.0,)), Point("SVD", 0.25, 5.0, 0.4, (8.0,))
    assert within([weak, strong], BASELINE, 8.0) == strong


def test_neurons_are_matched():
    rng = np.random.default_rng(0)
    expert = rng.standard_normal((6, 10)).astype(np.float32)
    shuffled = np.stack([expert, expert[::-1]])
    as_is, matched = cosines(shuffled)
    assert as_is < 0.9 and matched == pytest.approx(1.0, abs=1e-6)
    assert least_error_per_neuron(shuffled, np.stack([expert[::-1], expert])) == pytest.approx(0.0, abs=1e-6)
    # Lost neurons cost what they hold.
    lost = least_error_per_neuron(shuffled[:1], np.pad(expert[None, 2:], ((0, 0), (0, 2), (0, 0))))
    assert lost == pytest.approx(np.sum(expert[:2] ** 2) / 6, rel=1e-5)
