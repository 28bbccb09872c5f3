"""Experts that stay in the codes of a quantised checkpoint stand for the very numbers that it is decoded to."""

import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

import moe_jax
from moe_jax.commands.cli import main
from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.kept_experts import assert_kept_as_decoded
from tests.support.packed_weights import awq_settings, gptq_settings, in_awq, in_gptq
from tests.support.quantized_checkpoints import plain_checkpoint, write_quantised

WIDE = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """name, codes -> a small Mixture-of-Experts whose experts are in these codes, as a Hugging Face directory."""
    root = tmp_path_factory.mktemp("quantised")

    def make(name: str, code: str) -> pathlib.Path:
        folder = root / f"{name}-{code}"
        if not folder.exists():
            plain = root / name
            if not plain.exists():
                plain_checkpoint(plain, name, **WIDE, **({"moe_intermediate_size": 96} if "qwen" in name else {}))
            moe_jax.export(plain, folder, format="compressed-tensors", bits=code)
        return folder

    return make


@pytest.mark.parametrize(
    ("name", "code"), [("mixtral", "4"), ("qwen3_moe", "8"), ("olmoe", "nvfp4"), ("mixtral", "mxfp4")]
)
def test_kept_codes_stand_for_what_decoding_gives(quantised, tmp_path, name, code, capfd):
    assert_kept_as_decoded(quantised(name, code), tmp_path, "4" if "fp" in code else code, capfd)


@pytest.mark.parametrize(
    ("quantise", "settings", "bits"),
    [(in_gptq(), gptq_settings(), "4"), (in_gptq(3), gptq_settings(3), "3"), (in_awq(), awq_settings(), "4")],
    ids=["gptq 4", "gptq 3", "awq"],
)
def test_codes_of_gptq_and_awq(tmp_path, quantise, settings, bits, capfd):
    """With zero points, and scales in halves."""
    plain = plain_checkpoint(tmp_path / "plain", "mixtral", **WIDE)
    folder, _ = write_quantised(plain, tmp_path, quantise, settings)
    assert_kept_as_decoded(folder, tmp_path, bits, capfd)


def test_inspect_counts_kept_codes(quantised, tmp_path, capfd):
    moe_jax.convert(quantised("mixtral", "4"), tmp_path / "kept", codes="keep")
    capfd.readouterr()
    assert main(["inspect", str(tmp_path / "kept")]) == 0
    config = ModelDirectory(tmp_path / "kept").config
    count = len(config.moe_layers) * config.moe(config.moe_layers[0]).num_experts * 3 * 64 * 96
    assert f" parameters and {count:,} weights in codes, " in capfd.readouterr().out


def test_kept_experts_are_tuned_scored_and_exported_again(quantised, tmp_path):
    """Without ever being whole: the codes that leave are those that came."""
    folder = quantised("mixtral", "4")
    moe_jax.convert(folder, kept := tmp_path / "kept", codes="keep")
    ids = np.random.default_rng(0).integers(0, 64, 60).tolist()
    scored = moe_jax.evaluate(kept, ids, seq_len=20).nll
    assert scored == pytest.approx(moe_jax.evaluate(folder, ids, seq_len=20).nll, abs=1e-5)
    moe_jax.adapt(kept, tuned := tmp_path / "tuned", method="perft-e", adapter="lora:2")
    assert moe_jax.evaluate(tuned, ids, seq_len=20).nll == pytest.approx(scored, abs=1e-6)  # adapters begin at zero
    moe_jax.export(kept, tmp_path / "again", format="compressed-tensors")
    first, second = (load_file(where / "model.safetensors") for where in (folder, tmp_path / "again"))
    packed = [name for name in first if ".experts." in name and not name.endswith("_scale")]
    assert packed and first.keys() == second.keys()
    for name in packed:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    decoded = [HuggingFaceDirectory(where) for where in (folder, tmp_path / "again")]
    for path in decoded[0].specs():
        np.testing.assert_array_equal(*(source.read(path) for source in decoded), err_msg=path)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [("mixtral", "fp8", "is in fp8, whose codes do not lie in groups"), ("llama", "4", "model has no experts")],
)
def test_what_cannot_stay_in_codes(quantised, tmp_path, name, code, message):
    parts = {"parts": "model"} if name == "llama" else {}
    plain = plain_checkpoint(tmp_path / "plain", name, **WIDE)
    folder = moe_jax.export(plain, tmp_path / "codes", format="compressed-tensors", bits=code, **parts)
    with pytest.raises(moe_jax.InputError, match=message):
        moe_jax.convert(folder, tmp_path / "kept", codes="keep")
    with pytest.raises(moe_jax.InputError, match="with a quantization_config"):
        moe_jax.convert(plain, tmp_path / "kept", codes="keep")
    assert not (tmp_path / "kept").exists()
