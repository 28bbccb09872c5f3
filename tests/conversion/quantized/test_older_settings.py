"""Checkpoints of older releases of AutoGPTQ and AutoAWQ, whose settings are in a file beside config.json."""

import json
import pathlib

import pytest

import moe_jax
from moe_jax.commands.cli import main
from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory
from moe_jax.model_io.lineage import files_of_model
from tests.support.packed_weights import awq_settings, gptq_settings, in_awq, in_gptq
from tests.support.quantized_checkpoints import assert_reads_as, plain_checkpoint, write_quantised

GPTQ, AWQ = "quantize_config.json", "quant_config.json"
FILES = {
    GPTQ: {"bits": 4, "group_size": 16, "damp_percent": 0.01, "desc_act": False, "sym": False, "true_sequential": True},
    AWQ: {"w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"},
}


def quantised(folder: pathlib.Path, file: str) -> tuple[pathlib.Path, pathlib.Path]:
    """A checkpoint with its settings in config.json, and what it is decoded to."""
    quantise, settings = (in_gptq(), gptq_settings()) if file == GPTQ else (in_awq(), awq_settings())
    return write_quantised(plain_checkpoint(folder / "plain", "llama"), folder, quantise, settings)


def without_settings(folder: pathlib.Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("file", FILES)
def test_settings_beside_the_config(file, tmp_path):
    folder, decoded = quantised(tmp_path, file)
    without_settings(folder)
    with pytest.raises(moe_jax.InputError, match="'quantization_config'"):
        moe_jax.convert(folder, tmp_path / "never")
    (folder / file).write_text(json.dumps(FILES[file]))
    before = HuggingFaceDirectory(folder).fingerprint()
    assert_reads_as(folder, decoded, tmp_path)
    (folder / file).write_text(json.dumps(FILES[file] | {"more": 1}))
    assert HuggingFaceDirectory(folder).fingerprint() != before


def test_weights_under_their_oldest_name(tmp_path, capfd):
    folder, decoded = quantised(tmp_path, GPTQ)
    without_settings(folder)
    (folder / GPTQ).write_text(json.dumps(FILES[GPTQ]))
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-16g.safetensors")
    assert_reads_as(folder, decoded, tmp_path)
    assert main(["convert", str(folder), str(tmp_path / "never"), "--dry-run"]) == 0
    assert "in gptq4" in capfd.readouterr().out


def test_files_that_say_nothing_about_what_is_there(tmp_path):
    """Of a checkpoint without codes, or one whose config.json has settings of its own."""
    folder, decoded = quantised(tmp_path, AWQ)
    (decoded / GPTQ).write_text(json.dumps(FILES[GPTQ]))
    assert HuggingFaceDirectory(decoded).quantized_as is None
    (folder / GPTQ).write_text(json.dumps(FILES[GPTQ]))
    (folder / AWQ).write_text("{")
    assert_reads_as(folder, decoded, tmp_path)


@pytest.mark.parametrize(
    ("in_config", "files", "message"),
    [
        (True, {GPTQ: FILES[GPTQ] | {"bits": 8}}, "quantize_config.json say different"),
        (False, FILES, "quant_config.json say different"),
        (False, {GPTQ: {"bits": 5}}, "quantize_config.json: 'bits' is 5"),
        (False, {GPTQ: {"bits": 4, "quant_method": "gptk"}}, "quantize_config.json: unknown"),
        (False, {AWQ: FILES[AWQ] | {"q_group_size": 0}}, "'group_size' is 0"),
        (False, {AWQ: [1]}, "expected an object"),
    ],
)
def test_settings_that_contradict_or_are_not_read(in_config, files, message, tmp_path):
    folder, _ = quantised(tmp_path, GPTQ)
    if not in_config:
        without_settings(folder)
    for name, settings in files.items():
        (folder / name).write_text(json.dumps(settings))
    with pytest.raises(moe_jax.InputError, match=message) as caught:
        HuggingFaceDirectory(folder)
    assert "\n" not in str(caught.value)


def test_what_is_fetched_of_a_repository():
    others = ["config.json", "quantize_config.json", "quant_config.json"]
    old = "gptq_model-4bit--1g.safetensors"
    assert files_of_model([*others, old, "x.py"]) == [*others, old]
    assert files_of_model([*others, old, "model.safetensors"]) == [*others, "model.safetensors"]
