"""`moe-jax compress --recover`, as a user runs it."""

import json

import numpy as np
import pytest

import moe_jax
from moe_jax.api import recover
from moe_jax.core.errors import InputError
from moe_jax.files.staging import leftovers
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.training.recovery.recovery_run import run_recovery
from moe_jax.training.recovery.small_parameters import small_parameters
from tests.support.moe_models import same_weights
from tests.support.tiers import long

QUANTIZE = ("--method", "quantize", "--bits", 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--recover", 5), "with --calibrate"),
        (("--calibrate", "TEXT", "--recover", 0), "--recover 0.0"),
        (("--calibrate", "TEXT", "--recover", "nan"), "finite number"),
        (("--calibrate", "TEXT", "--recover-steps", 0), "recover_steps=0"),
        (("--calibrate", "TEXT", "--recover", 1, "--seq-len", 512), "1 rows"),
        (("--calibrate", "MISSING", "--recover", 1), "MISSING"),
        (("--calibrate", "TEXT", "--recover", 1, "--sweep", "--text", "TEXT"), "not with --sweep"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(models, tmp_path, text, failing, given, said):
    words = {"TEXT": text, "MISSING": tmp_path / "MISSING"}
    method = QUANTIZE if "--sweep" not in given else ()
    given = [words.get(word, word) for word in given]
    assert said in failing(models["one"], tmp_path / "out", *method, *given)


def test_an_original_that_is_gone_is_refused_in_a_line(tmp_path, text, failing):
    given = ("--calibrate", text, "--recover", 1)
    assert "absent" in failing(tmp_path / "absent", tmp_path / "out", *QUANTIZE, *given)


@pytest.mark.parametrize("minutes", [-1.0, float("inf"), "5", True])
def test_minutes_in_python_are_a_number_above_zero(minutes):
    with pytest.raises(InputError, match="minutes above 0"):
        moe_jax.CompressSpec(method="quantize", calibrate="text", recover=minutes)


@long
def test_a_command_that_was_stopped_goes_on_with_what_it_has(models, tmp_path, text, out_of, monkeypatch):
    """Nothing appears at OUT before it is whole; the layers are not compressed again; the result is the same."""
    given = (
        *QUANTIZE,
        "--calibrate",
        text,
        "--seq-len",
        16,
        "--recover-steps",
        6,
        "--calibration-dir",
        tmp_path / "in",
    )
    printed = out_of("compress", models["one"], tmp_path / "whole", *given)
    assert "recovery: KL from the original" in printed

    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as changed:
        changed.setattr(recover, "run_recovery", stopped)
        options = {"bits": 2, "calibrate": text, "seq_len": 16, "calibration_dir": tmp_path / "in"}
        options |= {"recover_steps": 6, "method": "quantize"}
        with pytest.raises(KeyboardInterrupt):
            moe_jax.compress(models["one"], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    [left] = leftovers(tmp_path / "out")
    made = (left / "compressed").stat().st_mtime_ns

    def seen(*arguments, **options):
        assert (left / "compressed").stat().st_mtime_ns == made and not (tmp_path / "out").exists()
        return run_recovery(*arguments, **options)

    monkeypatch.setattr(recover, "run_recovery", seen)
    layers = out_of("compress", models["one"], tmp_path / "out", *given, "--json").splitlines()
    assert [json.loads(line).get("layer") for line in layers] == [0, None]
    assert same_weights(tmp_path / "whole", tmp_path / "out") and leftovers(tmp_path) == []

    entry = ModelDirectory(tmp_path / "out").lineage[-1]
    assert entry["options"]["recover_steps"] == 6 and entry["measured"]["recovery"]["steps"] == 6
    assert entry["measured"]["recovery"] == json.loads(layers[-1])["recovery"]


@long
@pytest.mark.parametrize("options", [{"method": "quantize", "bits": 2}, {"method": "reap", "keep": 0.5}])
def test_what_is_not_small_is_that_of_the_compression_alone(models, text, options):
    options = options | {"calibrate": text, "seq_len": 16}
    model = moe_jax.load(models["one"])
    plain = moe_jax.compress(model, **options)
    tuned = moe_jax.compress(model, **options, recover_steps=8, recover=5.0)
    assert plain.report.recovery is None and tuned.report.recovery.steps == 8
    assert tuned.lineage[-1]["measured"]["bytes_after"] == plain.lineage[-1]["measured"]["bytes_after"]
    before, after = plain.source, tuned.source
    assert before.specs() == after.specs()
    differ = {path for path in before.specs() if not np.array_equal(before.read(path), after.read(path))}
    assert differ and differ <= small_parameters(tuned.config)


@long
def test_rows_of_a_conversation_are_learnt_from(models, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"What is {i}?", "response": f"It is {i} and {i + 1}."} for i in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tuned = moe_jax.compress(
        models["one"], method="quantize", bits=2, calibrate=file, seq_len=48, recover_steps=4, batch_size=4
    )
    report = tuned.report.recovery
    # The response and its end, of one row in eight.
    assert report.held_out_tokens < 24 and report.steps == 4
