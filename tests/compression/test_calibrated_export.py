"""Models leave in codes that a text has chosen: outputs change less, the loss is said, and a killed job goes on."""

import re

import pytest

import moe_jax
from moe_jax.commands.cli import main
from tests.support.calibrated_codes import by_text, check_nearer, killed_and_continued, logits, mean_nll
from tests.support.tiers import one_in

CODES = ("--format", "compressed-tensors", "--parts", "model", "--bits", "4", "--group-size", "8")
LOSSES = r"the text of the calibration: (\d\.\d{4}) nats per token before, (\d\.\d{4}) in codes"


def exported(model, out, *more) -> int:
    return main(["export", str(model), str(out), *CODES, *map(str, more)])


@one_in(2)
@pytest.mark.parametrize("zeros", [False, True])
def test_outputs_change_less_and_the_losses_are_those_of_the_models(models, text, windows, tmp_path, capfd, zeros):
    more = ("--zero-points",) if zeros else ()
    assert exported(models["moe"], tmp_path / "rounded", *more) == 0
    assert "nats" not in capfd.readouterr().err
    count = len(windows)
    assert exported(models["moe"], tmp_path / "by_text", *more, *by_text(text, count)) == 0
    said = capfd.readouterr().err
    assert f"chosen by what {text} gives the model" in said
    whole, rounded, ours = (
        logits(path, windows) for path in (models["moe"], tmp_path / "rounded", tmp_path / "by_text")
    )
    check_nearer(whole, ours, rounded)
    found = re.search(LOSSES, said)
    assert found is not None, said
    stated = [float(one) for one in found.groups()]
    assert stated == pytest.approx([mean_nll(whole, windows), mean_nll(ours, windows)], abs=2e-4)


def test_experts_with_a_shared_base_are_merged_and_coded_once(models, text, windows, tmp_path, capfd):
    small = moe_jax.compress(models["moe"], tmp_path / "small", method="ders-quantize", bits=4)
    assert exported(small.path, tmp_path / "codes", *by_text(text)) == 0
    assert exported(small.path, tmp_path / "rounded") == 0
    whole, ours, rounded = (logits(path, windows) for path in (small.path, tmp_path / "codes", tmp_path / "rounded"))
    check_nearer(whole, ours, rounded)


@one_in(3, first=1)
@pytest.mark.parametrize(("layer", "when"), [(1, "finish"), (0, "begin"), (2, "begin")])
def test_a_killed_job_goes_on(models, text, tmp_path, monkeypatch, layer, when):
    once, again = tmp_path / "once", tmp_path / "again"
    assert exported(models["moe"], once, *by_text(text)) == 0

    def run(out):
        return exported(models["moe"], out, *by_text(text))

    begun = killed_and_continued(run, again, layer, when, monkeypatch)
    assert begun == list(range(layer, 3))
    for file in once.glob("*.safetensors"):
        assert file.read_bytes() == (again / file.name).read_bytes()
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--bits", "fp8", "--format", "compressed-tensors"), "no part gets"),
        (("--format", "checkpoint"), "which have codes"),
        (("--format", "compressed-tensors", "--samples", "9999"), "ask for at most"),
        (("--format", "compressed-tensors", "--samples", "0"), "at least 1"),
        (("--format", "gguf", "--imatrix", "file"), "give one of them"),
    ],
)
def test_bad_input_is_one_line(models, text, tmp_path, capfd, options, said):
    out = tmp_path / ("out.gguf" if "gguf" in options else "out")
    words = ["export", str(models["one"]), str(out), "--calibrate", str(text), "--seq-len", "32", *options]
    assert main(words) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("moe-jax: error")]
    assert said in line
    assert not out.exists()


def test_options_of_a_calibration_need_one(models, tmp_path, capfd):
    assert exported(models["one"], tmp_path / "out", "--samples", "3") == 2
    assert "only with --calibrate" in capfd.readouterr().err
    assert main(["export", str(models["one"]), str(tmp_path / "out"), "--zero-points"]) == 2
    assert "only with --format" in capfd.readouterr().err
