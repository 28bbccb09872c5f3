"""What `benchmarks/peft_quality.py` trains, on a tiny model, and what it makes of its results."""

import dataclasses
import pathlib
import sys

import numpy as np
import pytest

from moe_jax.loading import leaf_specs
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from moe_jax.upcycle import upcycled_config

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))

from tuning.findings import DISAGREES, UNDECIDED, verdict  # noqa: E402
from tuning.kinds import KINDS, kind_config, vanilla_options  # noqa: E402
from tuning.models import Leaves, grown, leaves_of, model_of  # noqa: E402
from tuning.report import write_report  # noqa: E402
from tuning.results import Results  # noqa: E402
from tuning.settings import Settings  # noqa: E402
from tuning.summary import Point, at_equal_active, compare  # noqa: E402
from tuning.trainer import Trainer  # noqa: E402
from tuning.variants import D, E, R, S, Variant, active_params, rates_of, tuned_config, variants  # noqa: E402

D_MODEL, LENGTH, VOCAB = 16, 16, 32
DENSE = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    d_model=D_MODEL,
    max_positions=LENGTH,
    layers=(
        LayerConfig(
            attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
            mlp=FFNConfig(dim=24),
        ),
    )
    * 2,
    tie_embeddings=True,
)
SETTINGS = Settings(num_experts=4, top_k=2)
MOE = upcycled_config(DENSE, vanilla_options(SETTINGS))


def test_active_parameters_are_those_of_the_formulas():
    d, layers, k = D_MODEL, 2, SETTINGS.top_k
    expected = {
        Variant(S, 2): layers * 2 * d * 2,
        Variant(D, 2, 3): layers * 3 * 2 * d * 2,
        Variant(E, 2, 4): layers * k * 2 * d * 2,
        Variant(R, 2, 8, 3): layers * (3 * 2 * d * 2 + 8 * d),
        Variant("LoRA q,v", 2): layers * 2 * ((d + 16) + (d + 8)),
        Variant("LoRA router", 2): layers * 2 * (d + 4),
        Variant("full fine-tuning"): 0,
    }
    assert {variant: active_params(tuned_config(MOE, variant)) for variant in expected} == expected


def test_every_variant_has_a_learning_rate_of_its_family():
    names = {variant.name for variant in variants(Settings())}
    assert len(names) == len(variants(Settings()))
    for variant in variants(Settings()):
        source = rates_of(variant, Settings())
        assert source.name in names and source.family == variant.family and rates_of(source, Settings()) == source
    assert all(KINDS[kind.rates_of].rates_of is None for kind in KINDS.values() if kind.rates_of)


def test_adapters_are_trained_beside_a_base_that_stays():
    rng = np.random.default_rng(0)
    leaves = {
        path: (np.ones if "norm" in path else lambda shape: rng.normal(0, 0.2, shape))(spec.shape).astype(np.float32)
        for path, spec in leaf_specs(DENSE).items()
    }
    dense = Leaves(DENSE, leaves)
    tokens = rng.integers(0, VOCAB, (2, LENGTH + 1)).astype(np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((2, LENGTH), np.float32),
        "segment_ids": np.ones((2, LENGTH), np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1)),
    }
    config = kind_config(DENSE, dataclasses.replace(KINDS["PESC 8, rest frozen"], adapter=4), SETTINGS)
    start = grown(config, dense, seed=1)
    trainer = Trainer(config, steps=4, warmup_steps=1)
    model, ids = model_of(start), tokens.ravel()
    trained = trainer.run(model, [batch] * 4, seed=0, peak=1e-2)
    before, after = trainer.score(model, ids, LENGTH), trainer.score(trained.model, ids, LENGTH)
    assert after < before - 1e-3
    assert min(trained.auxiliary) > 0.9 * 2 * SETTINGS.balance_coef
    assert trainer.score(trainer.run(model, [batch] * 4, seed=0, peak=1e-9).model, ids, LENGTH) == pytest.approx(before)
    assert trainer.score(trainer.run(model, [batch] * 4, seed=0, peak=1e-2).model, ids, LENGTH) == after
    changed = {path for path, leaf in leaves_of(trained.model).leaves.items() if (leaf != start.leaves[path]).any()}
    assert changed == {path for path in start.leaves if "adapters" in path or "router" in path}
    assert trainer.trained_params == sum(start.leaves[path].size for path in changed)


def _point(rank: int, *losses: float, rate: float = 0.01) -> Point:
    return Point(Variant(S, rank), 100 * rank, rate, {str(seed): loss for seed, loss in enumerate(losses)})


def test_curves_are_compared_at_equal_active_parameters():
    line = [_point(1, 4.0, 5.0), _point(4, 2.0, 3.0)]
    assert at_equal_active(line, 200).losses == pytest.approx({"0": 3.0, "1": 4.0})
    assert at_equal_active(line, 99) is None and at_equal_active(line, 401) is None
    others = [_point(2, 3.5, 4.25), _point(4, 1.5, 3.25), _point(8, 0.0, 0.0)]
    found = compare(line, others)
    assert (found.budgets, found.won) == (2, 1) and found.gains == pytest.approx([0.0, 0.25])
    assert compare(line, [_point(8, 1.0, 1.0)]) is None


def test_what_a_learning_rate_does_is_not_the_method_s():
    line = [_point(1, 4.0), _point(4, 2.0, rate=0.03)]
    # Between the two the curve has two rates, at its ends one.
    others = [_point(1, 4.5), _point(2, 9.0), _point(2, 9.0, rate=0.03), _point(4, 9.0)]
    found = compare(line, others)
    assert (found.budgets, found.left_out, found.won) == (1, 3, 1) and found.gains == pytest.approx([0.5])
    assert compare(line, others[1:]).gains == []


def test_a_verdict_needs_all_seeds():
    assert verdict([0.1, 0.2]) == "agrees with the paper"
    assert verdict([-0.1, -0.2]) == DISAGREES
    assert verdict([-0.1, 0.3]) == UNDECIDED


@pytest.fixture
def results(tmp_path: pathlib.Path) -> Results:
    """Two seeds; the larger the rank the better, of PERFT-D with 8 adapters the worse."""
    results = Results(tmp_path / "results.json", Settings())
    run = {"learning_rate": 0.01, "start_validation_loss": 5.0, "auxiliary": [0.05, 0.06], "trained_params": 1000}
    kinds = {"dense": 2.5, "vanilla": 2.4, "PESC 8, rest full": 2.3, "PESC 8, rest LoRA": 2.6}
    for seed in (0, 1):
        for name, loss in kinds.items():
            results.put("upcycled", "shakespeare", name, str(seed), value=run | {"loss": loss + seed})
        for variant in variants(Settings()):
            if variant.family not in (R, S, D) or variant.parallel or (variant.family == R and variant.top_k != 2):
                continue
            slope = 0.01 if (variant.family, variant.experts) == (D, 8) else -0.01
            loss = {R: 3.0, S: 4.0, D: 4.0}[variant.family] + slope * variant.rank + seed
            active = 1280 * variant.rank * variant.experts
            value = run | {"loss": loss, "active_params": active}
            results.put("tuned", "code", variant.name, str(seed), value=value)
    return results


def test_tables_show_means_over_seeds(results, tmp_path: pathlib.Path):
    lines = write_report(results, tmp_path).splitlines()
    row = "| PESC 8, rest full | 1,000 | 0.01 | 2.8000 ± 0.7071 | -0.2000 ± 0.0000 | -0.1000 ± 0.0000 |"
    assert row in lines
    assert "| PERFT-S r=8 | 1,000 | 10,240 | 0.01 | 4.4200 ± 0.7071 |" in lines
    assert (tmp_path / "peft_quality.md").read_text().splitlines() == lines
    for name in ("pesc", "perft"):
        assert (tmp_path / f"peft_quality_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_findings_follow_the_numbers(results, tmp_path: pathlib.Path):
    text = write_report(results, tmp_path)
    assert "- PERFT-R above PERFT-S at equal active parameters and rates: better at 3 of 3 budgets (0 left" in text
    assert "- PERFT-D M=8 degrades from rank 2 to 32: loss changes by +0.3000 ± 0.0000 at rate 0.01; agrees" in text
    said = "- PERFT-D M=2 degrades from rank 2 to 32: loss changes by -0.3000 ± 0.0000 at rate 0.01; **does not agree"
    assert said in text
    assert "differ by at most 0 nats" in text
    for seed in ("0", "1"):
        worse = results.get("tuned", "code", "PERFT-S r=32", seed) | {"start_validation_loss": 5.25}
        results.put("tuned", "code", "PERFT-S r=32", seed, value=worse)
    assert "tuned: before training, the losses of all that start from the same model differ by at most 0.2" in (
        write_report(results, tmp_path)
    )


def test_runs_of_other_learning_rates_decide_nothing(results, tmp_path: pathlib.Path):
    for seed in ("0", "1"):
        for name in ("PERFT-D 8 r=32", *(f"PERFT-S r={rank}" for rank in (2, 4, 8, 16, 32, 64))):
            other = results.get("tuned", "code", name, seed) | {"learning_rate": 0.003}
            results.put("tuned", "code", name, str(seed), value=other)
    tried = {2: {"0.01": 4.0, "0.1": 5.0}, 32: {"0.01": 3.5, "0.1": 6.0}}
    for rank, losses in tried.items():
        value = {"text": "code", "validation_loss": losses, "chosen": 0.01}
        results.put("rates", "tuned", f"PERFT-D 4 r={rank}", value=value)
    for name, chosen in (("PESC 8, rest full", 0.001), ("PESC 8, rest frozen", 0.03)):
        results.put("rates", "upcycled", name, value={"validation_loss": {f"{chosen:g}": 3.0}, "chosen": chosen})
    text = write_report(results, tmp_path)
    assert "- PERFT-R above PERFT-S: not decided, no budget has equal rates (3 left out, whose rates differ)." in text
    said = "- PERFT-D M=8 degrades from rank 2 to 32: loss changes by +0.3000 ± 0.0000, at rate 0.01 and then 0.003"
    assert said in text
    said = "- PERFT-D at a fixed rate, ranks 2 / 32, validation loss of one seed: 0.01: 4.000 / 3.500; 0.1: 5.000 / 6"
    assert said in text
    assert "- PESC 8, rest full: 0.2000 ± 0.0000 lower than dense; not decided: all parameters have one" in text


def test_what_is_not_there_yet_is_left_out(tmp_path: pathlib.Path):
    assert write_report(Results(tmp_path / "results.json", Settings()), tmp_path) == ""
    assert not list(tmp_path.glob("*.png"))
