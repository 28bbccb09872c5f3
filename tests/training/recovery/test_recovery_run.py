"""Recovery: what is small in a compressed model is tuned against the original, and nothing else changes."""

import jax
import numpy as np
import pytest

import moe_jax
from moe_jax.checkpoints.orbax_store import TrainingCheckpoints
from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.core.errors import InputError
from moe_jax.model_io.in_memory import LeavesInMemory, ModelInMemory
from moe_jax.training.recovery import recovery_run
from moe_jax.training.recovery.recovery_run import Limit, run_recovery
from moe_jax.training.recovery.small_parameters import small_parameters
from moe_jax.training.recovery.text_batches import TextBatches, batches_once, divide_rows
from tests.support.tiers import long

LENGTH = 12


def rows_of(vocab_size: int, count: int = 40) -> CalibrationRows:
    # Few of the tokens, so that there is something to learn.
    tokens = np.random.default_rng(0).integers(0, min(vocab_size, 16), (count, LENGTH))
    return CalibrationRows.of_windows(tokens.astype(np.int32))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def expected_scores(original: moe_jax.Model, model: moe_jax.Model, rows: CalibrationRows) -> tuple[float, float]:
    """KL(original || model) and the cross-entropy of the model, means over the scored tokens, in float64."""
    of_original, of_model = (log_softmax(np.asarray(one(rows.tokens).logits)) for one in (original, model))
    divergence = (np.exp(of_original) * (of_original - of_model)).sum(axis=-1)
    loss = -np.take_along_axis(of_model, rows.targets[..., None], axis=-1)[..., 0]
    return tuple(float((one * rows.weights).sum() / rows.weights.sum()) for one in (divergence, loss))


@pytest.fixture(scope="module")
def original() -> moe_jax.Model:
    """A model with large weights, to which codes of two bits make a difference."""
    made = moe_jax.tiny_model(experts=4).source
    large = {path: made.read(path) * (8 if path.endswith("kernel") else 1) for path in made.specs()}
    return moe_jax.Model.of_source(ModelInMemory(made.config, LeavesInMemory(large)))


@pytest.fixture(scope="module")
def compressed(original) -> moe_jax.Model:
    return moe_jax.compress(original, method="quantize", bits=2)


def tuned(compressed: moe_jax.Model, leaves: dict[str, np.ndarray]) -> moe_jax.Model:
    """The model with these leaves in place of its own."""
    source = compressed.source
    every = {path: leaves.get(path, source.read(path)) for path in source.specs()}
    return moe_jax.Model.of_source(ModelInMemory(source.config, LeavesInMemory(every)))


def test_small_parameters_are_tuned_and_the_figures_are_those_of_the_written_model(original, compressed):
    rows = divide_rows(rows_of(original.config.vocab_size), seed=1)
    found = run_recovery(
        compressed.source, original.source, rows, Limit(steps=16), batch_size=4, devices=jax.devices()[:1]
    )
    report = found.report
    assert found.leaves.keys() == small_parameters(compressed.config)
    assert {path.rsplit("/", 1)[-1] for path in found.leaves} == {"kernel", "scale", "scales"}
    assert all(leaf.dtype == compressed.source.specs()[path].dtype for path, leaf in found.leaves.items())
    before = expected_scores(original, compressed, rows.held_out)
    after = expected_scores(original, tuned(compressed, found.leaves), rows.held_out)
    assert (report.divergence_before, report.loss_before) == pytest.approx(before, rel=1e-4)
    assert (report.divergence_after, report.loss_after) == pytest.approx(after, rel=1e-4)
    assert report.divergence_after < 0.95 * report.divergence_before
    assert (report.steps, report.best_step, report.tokens) == (16, 16, 16 * 4 * (LENGTH - 1))
    assert report.held_out_tokens == rows.held_out.weights.sum() == 5 * (LENGTH - 1)
    assert "step 16 of 16 steps" in report.in_words()


@long
def test_it_is_the_same_on_all_devices_and_after_an_interruption(original, compressed, tmp_path, monkeypatch):
    monkeypatch.setattr(recovery_run, "_SCORED_AFTER", (4, 8))
    rows = divide_rows(rows_of(original.config.vocab_size), seed=1)
    models, limit = (compressed.source, original.source, rows), Limit(steps=21)
    whole = run_recovery(*models, limit, devices=jax.devices()[:1])
    everywhere = run_recovery(*models, limit)
    assert everywhere.report.divergence_after == pytest.approx(whole.report.divergence_after, rel=1e-2)
    assert everywhere.report.divergence_before == pytest.approx(whole.report.divergence_before, rel=1e-4)

    def stop(what: str, done: float, total: float) -> None:
        if done == 18:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_recovery(*models, limit, devices=jax.devices()[:1], folder=tmp_path / "saved", progress=stop)
    checkpoints = TrainingCheckpoints(tmp_path / "saved", keep=1)
    assert checkpoints.latest_step() == 16
    checkpoints.close()
    seen = []
    went_on = run_recovery(
        *models,
        limit,
        devices=jax.devices()[:1],
        folder=tmp_path / "saved",
        progress=lambda what, done, total: seen.append(done),
    )
    assert seen[1:] == [16, 17, 18, 19, 20, 21]
    for path, leaf in whole.leaves.items():
        np.testing.assert_array_equal(leaf, went_on.leaves[path], err_msg=path)
    assert went_on.report.tokens == whole.report.tokens and went_on.report.best_step == whole.report.best_step


@long
def test_a_model_that_is_the_original_stays_as_it_is_and_minutes_end_it(original):
    rows = divide_rows(rows_of(original.config.vocab_size), seed=1)
    source, one = original.source, {"devices": jax.devices()[:1]}
    found = run_recovery(source, source, rows, Limit(steps=2), **one)
    assert found.leaves == {} and found.report.best_step == 0
    assert found.report.divergence_after == found.report.divergence_before == pytest.approx(0, abs=1e-6)
    assert "nothing was won" in found.report.in_words()
    # Models are not even loaded in so short a time.
    assert run_recovery(source, source, rows, Limit(minutes=1e-6), **one).report.steps == 0
    assert run_recovery(source, source, rows, Limit(steps=10**6, minutes=0.2), **one).report.steps < 10**6


@long
def test_a_loss_that_is_not_finite_ends_it(original, compressed, monkeypatch):
    rows = divide_rows(rows_of(original.config.vocab_size), seed=1)
    monkeypatch.setattr(recovery_run, "_RATE", 1e30)
    found = run_recovery(compressed.source, original.source, rows, Limit(steps=30), devices=jax.devices()[:1])
    assert found.report.steps < 30 and found.leaves == {}


def test_weights_that_are_not_finite_are_refused(original, compressed):
    rows = divide_rows(rows_of(original.config.vocab_size), seed=1)
    path = "final_norm/scale"
    broken = tuned(compressed, {path: np.full_like(compressed.source.read(path), np.nan)})
    with pytest.raises(InputError, match="final_norm/scale"):
        run_recovery(broken.source, original.source, rows, Limit(steps=1), devices=jax.devices()[:1])


def test_what_is_small(original, compressed):
    """Neither codes, nor kernels but the router's, nor the embedding."""
    of_layer = {"attention_norm/scale", "mlp_norm/scale", "mlp/router/kernel"}
    own = {f"layers/{layer}/{name}" for layer in (0, 1) for name in of_layer} | {"final_norm/scale"}
    assert small_parameters(original.config) == own
    scales = {f"layers/{layer}/mlp/experts/delta/{name}/scales" for layer in (0, 1) for name in ("gate", "up", "down")}
    assert small_parameters(compressed.config) == own | scales


def test_rows_are_divided_and_come_in_an_order_of_the_seed():
    rows = rows_of(64, 300)
    tuned_rows, held_out = divide_rows(rows, seed=3)
    assert len(held_out) == 16 and len(tuned_rows) == 284
    found = sorted(map(bytes, (*tuned_rows.tokens, *held_out.tokens)))
    assert found == sorted(map(bytes, rows.tokens))
    assert len(divide_rows(rows_of(64, 4), seed=0).held_out) == 1

    few = rows_of(64, 5)
    batches = TextBatches(few, batch_size=2, seed=0)
    first_pass = np.concatenate([batches[step]["tokens"] for step in range(5)])  # twice over all
    for part in (first_pass[:5], first_pass[5:]):
        assert sorted(map(bytes, part)) == sorted(map(bytes, few.tokens))
    assert any(bytes(one) != bytes(other) for one, other in zip(first_pass[:5], first_pass[5:], strict=True))
    np.testing.assert_array_equal(batches[1]["tokens"], TextBatches(few, batch_size=2, seed=0)[1]["tokens"])

    *_, last = batches_once(few, 2)
    assert last["tokens"].shape == (2, LENGTH) and last["weights"].sum() == LENGTH - 1


def test_rows_that_do_not_do_are_refused():
    rows = rows_of(64)
    seen = CalibrationRows.of_windows(rows.tokens)
    object.__setattr__(seen, "pictures", (1,) * len(rows))
    unscored = CalibrationRows.of_windows(rows.tokens)
    unscored.weights[:] = 0
    for bad, said in ((rows.first(3), "3 rows"), (seen, "pictures"), (unscored, "no token")):
        with pytest.raises(InputError, match=said):
            divide_rows(bad, seed=0)
