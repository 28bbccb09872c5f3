"""Bad input to `moe-jax compress`: one line, exit code 2, and nothing half-written (see the fixture `failing`)."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from moe_jax.commands import cli
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import config_to_json
from tests.support.dense_models import write_model

RESMOE, UP = ("--method", "resmoe"), ("--method", "up")
KEPT = ("resmoe", "up", "sp", "svd", "msmoe", "meo", "git-rebasin", "mlp-fusion")


@pytest.mark.parametrize("keep", ["0", "1.5", "-0.25", "nan"])
@pytest.mark.parametrize("method", KEPT)
def test_shares_outside_their_range(method, keep, models, tmp_path, failing):
    message = failing(models["moe"], tmp_path / "out", "--method", method, f"--keep={keep}")
    assert f"keep={float(keep):g} must lie in (0, 1]" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RESMOE, "resmoe needs --keep, --target-bytes or --budget-bits"),
        ((*RESMOE, "--keep", "much"), "--keep 'much': expected numbers"),
        ((*RESMOE, "--keep", "0.1,0.2"), "--keep 0.1,0.2: several values need --sweep"),
        ((*RESMOE, "--keep", 0.5, "--drop", 0.5), "--drop does not go with resmoe: it belongs to ders-sparsify"),
        ((*RESMOE, "--keep", 0.5, "--residual", "sparse"), "unknown residual 'sparse'"),
        ((*RESMOE, "--residual", "quantized:5"), "bits=5 must be one of"),
        ((*RESMOE, "--keep", 0.5, "--bits", "four"), "--bits 'four': expected a whole number"),
        ((*RESMOE, "--keep", 0.5, "--solver", "sinkhorns"), "unknown solver 'sinkhorns' (did you mean 'sinkhorn'?)"),
        ((*RESMOE, "--keep", 0.5, "--target-bytes", "1GB"), "target_bytes chooses keep and bits itself"),
        ((*RESMOE, "--target-bytes", "1GB", "--budget-bits", 4), "say the same in two ways"),
        ((*RESMOE, "--target-bytes", "12XB"), "--target-bytes '12XB': expected bytes, such as 12GB"),
        ((*RESMOE, "--target-bytes", "-5"), "--target-bytes"),
        ((*RESMOE, "--target-bytes", "1kB"), "below the 9,216 bytes of the centres of 2 layers alone"),
        ((*RESMOE, "--budget-bits", 0), "budget_bits=0 must be above 0"),
        ((*RESMOE, "--budget-bits", "1e308"), "budget_bits=1e+308 must be"),
        ((*RESMOE, "--budget-bits", 5), "10.67 bits per expert weight"),
        ((*RESMOE, "--keep", 0.5, "--layers", "1"), "--layers: 1 of the model's MoE layers, which are 0, 2"),
        ((*RESMOE, "--keep", 0.5, "--layers", "7,9"), "--layers: 7, 9 of the model's MoE layers, which are 0, 2"),
        ((*UP, "--keep", 0.5, "--no-refit"), "--refit does not go with up"),
        ((*UP, "--keep", 0.5, "--budget-bits", 8), "--budget-bits does not go with up: it belongs to resmoe"),
        ((*UP, "--keep", 0.5, "--calibrate", "nowhere.txt"), "no text at nowhere.txt"),
    ],
)
def test_options_that_will_not_do(options, message, models, tmp_path, failing):
    assert message in failing(models["moe"], tmp_path / "out", *options)


@pytest.mark.parametrize("method", ["resmoe", "msmoe"])
def test_a_model_without_experts(method, models, tmp_path, failing, text):
    options = ("--method", method, "--keep", 0.5, "--calibrate", text)
    assert "the model is dense: it has no experts" in failing(models["dense"], tmp_path / "out", *options)


@pytest.mark.parametrize("method", ["resmoe", "up", "sp", "mlp-fusion", "git-rebasin"])
def test_weights_that_are_not_finite(method, models, tmp_path, failing):
    source = ModelDirectory(models["moe"])
    leaves = {name: source.read(name).copy() for name in source.specs()}
    leaves["layers/2/mlp/experts/up/kernel"][1, 2, 3] = np.nan
    model = write_model(tmp_path / "spoilt", source.config, leaves, source.tokenizer_files)
    message = failing(model, tmp_path / "out", "--method", method, "--keep", 0.5)
    assert "expert 1 in layer 2" in message and "not finite" in message


def test_experts_of_another_shape_than_the_config_says(models, tmp_path, failing):
    shutil.copytree(models["moe"], tmp_path / "model")
    config = ModelDirectory(models["moe"]).config
    layer = config.layers[2]
    narrow = dataclasses.replace(layer.mlp, expert=dataclasses.replace(layer.mlp.expert, dim=20))
    layers = (*config.layers[:2], dataclasses.replace(layer, mlp=narrow))
    described = config_to_json(dataclasses.replace(config, layers=layers))
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    error = failing(tmp_path / "model", tmp_path / "out", *RESMOE, "--keep", 0.5, lines=None)
    assert "layers/2/mlp/experts/up/kernel has shape (3, 16, 24), config.json says (3, 16, 20)" in error


def test_experts_of_different_shapes(models, tmp_path, failing, out_of):
    """In a Hugging Face checkpoint every expert has tensors of its own."""
    from safetensors.numpy import load_file, save_file

    hf = tmp_path / "hf"
    out_of("export", models["moe"], hf)
    (file,) = hf.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if ".experts.1." in name)
    tensors[name] = np.ascontiguousarray(tensors[name][:-1])
    save_file(tensors, file, metadata={"format": "pt"})
    error = failing(hf, tmp_path / "out", *RESMOE, "--keep", 0.5, lines=None)
    assert name in error and str(tensors[name].shape) in error.replace("[", "(").replace("]", ")")


def test_help_names_every_option_of_every_method(capsys):
    assert cli.main(["compress", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--keep", "--residual", "--solver", "--design", "--no-refit", "--target-bytes", "--budget-bits"):
        assert f" {option}" in shown, option
    assert "--refit" not in shown
