"""Whole models in codes: our own reader and Transformers read the same numbers, and what stays whole is whole."""

import json
import pathlib

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import moe_jax
from moe_jax.commands.cli import main
from moe_jax.conversion.formats.encoders import ENCODERS
from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory, open_checkpoint
from tests.support.numerics import logits_of
from tests.support.quantized_checkpoints import plain_checkpoint
from tests.support.tiers import one_in

TOKENS = [[1, 5, 9, 33, 2, 60, 17, 4, 4, 21, 8, 50]]
WIDE = {"hidden_size": 64, "intermediate_size": 96}
LATENT_WIDTHS = {"q_lora_rank": 32, "kv_lora_rank": 16, "v_head_dim": 16, "moe_intermediate_size": 48}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """name -> a small random model, as a Hugging Face directory."""
    root = tmp_path_factory.mktemp("plain")

    def make(name: str) -> pathlib.Path:
        folder = root / name
        return folder if folder.exists() else plain_checkpoint(folder, name, **WIDE)

    return make


def endings(folder: pathlib.Path) -> dict[str, set[str]]:
    """The parts that matrices are stored as, by the name of the module in its layer."""
    found: dict[str, set[str]] = {}
    for name in open_checkpoint(folder).tensors:
        module, _, part = name.rpartition(".")
        found.setdefault(module.rpartition(".")[2], set()).add(part)
    return found


@one_in(2)
@pytest.mark.parametrize(
    ("name", "code", "zeros"),
    [
        ("llama", "4", False),
        ("mixtral", "8", False),
        ("llama", "fp8", False),
        ("llama", "mxfp4", False),
        ("llama", "4", True),
        ("llama", "8", True),
    ],
)
def test_transformers_reads_what_we_read(plain, tmp_path, name, code, zeros):
    moe_jax.export(
        plain(name), tmp_path / "codes", format="compressed-tensors", bits=code, parts="model", zero_points=zeros
    )
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "codes",
        output_loading_info=True,
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(TOKENS)).logits.numpy()
    ours = np.asarray(logits_of(moe_jax.load(tmp_path / "codes").decoder, np.asarray(TOKENS, np.int32)))
    np.testing.assert_allclose(theirs, ours, atol=2e-5 * np.abs(ours).max())
    stored = endings(tmp_path / "codes")
    whole = {"model", "embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm", "gate"}
    assert {module for module, parts in stored.items() if parts == {"weight"}} <= whole
    assert {"q_proj", "o_proj"} <= {module for module, parts in stored.items() if "weight_scale" in parts}


@pytest.mark.parametrize(
    ("name", "options", "codes"),
    [
        (
            "llama",
            {"head_bits": 8, "attention_bits": "fp8"},
            {"q_proj": "F8_E4M3", "lm_head": "I32", "mlp.up_proj": "F32"},
        ),
        ("mixtral", {"attention_bits": "nvfp4", "bits": 4}, {"q_proj": "U8", "experts.1.w1": "I32", "lm_head": "F32"}),
        ("deepseek_v3", {"parts": "model", "dense_bits": "fp8-block"}, {"mlp.up_proj": "F8_E4M3", "q_b_proj": "I32"}),
    ],
)
def test_every_part_has_its_own_numbers(plain, tmp_path, name, options, codes, capfd):
    flags = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    out = str(tmp_path / "codes")
    assert main(["export", str(plain(name)), out, "--format", "compressed-tensors", *flags]) == 0
    said = capfd.readouterr().err
    assert "codes changed, of the norm of the weights: " in said
    tensors = open_checkpoint(tmp_path / "codes").tensors
    for module, dtype in codes.items():
        endings = (f"{module}.weight", f"{module}.weight_packed")
        assert {entry.dtype for tensor, entry in tensors.items() if tensor.endswith(endings)} == {dtype}, module
    settings = json.loads((tmp_path / "codes" / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "mixed-precision"
    assert len({group["format"] for group in settings["config_groups"].values()}) == 2
    source, whole = HuggingFaceDirectory(tmp_path / "codes"), HuggingFaceDirectory(plain(name))
    for path in whole.specs():
        kept, rounded = whole.read(path), source.read(path)
        assert np.linalg.norm(rounded - kept) <= 0.15 * np.linalg.norm(kept), path


@pytest.mark.parametrize(("code", "dtype", "noted"), [("nvfp4", [], 1), ("nvfp4", ["bfloat16"], 0), ("fp8", [], 0)])
def test_numbers_that_transformers_decodes_to_another_dtype_are_noted(plain, tmp_path, code, dtype, noted, capfd):
    options = ["--format", "compressed-tensors", "--bits", code, *(["--dtype", *dtype] if dtype else [])]
    assert main(["export", str(plain("mixtral")), str(tmp_path / "codes"), *options, "--dry-run"]) == 0
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(said) == noted and all("--dtype bfloat16" in line for line in said)


def test_blocks_that_vllm_refuses_are_named(plain, tmp_path, capfd):
    options = ["--format", "compressed-tensors", "--bits", "fp8-block", "--dry-run"]
    assert main(["export", str(plain("mixtral")), str(tmp_path / "codes"), *options]) == 0
    (note,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("note: "))
    assert "w1.weight: vLLM refuses [" in note
    assert ENCODERS["fp8-block"]().doubt((256, 384)) is None


@pytest.mark.parametrize(
    ("name", "widths", "together"),
    [
        ("llama", {}, ["q_proj k_proj v_proj", "gate_proj up_proj"]),
        ("mixtral", {}, ["q_proj k_proj v_proj", "w1 w3"]),
        ("deepseek_v3", LATENT_WIDTHS, ["q_a_proj kv_a_proj_with_mqa", "gate_proj up_proj"]),
    ],
)
def test_matrices_that_vllm_reads_as_one_share_the_scale_of_nvfp4(tmp_path, name, widths, together):
    plain = plain_checkpoint(tmp_path / "plain", name, **WIDE, **widths)
    moe_jax.export(plain, tmp_path / "codes", format="compressed-tensors", bits="nvfp4", parts="model")
    codes, whole = (load_file(folder / "model.safetensors") for folder in (tmp_path / "codes", plain))
    found = 0
    for first, *others in map(str.split, together):
        for name in [name for name in whole if name.endswith(f".{first}.weight")]:
            names = [name, *(name.replace(f".{first}.", f".{other}.") for other in others)]
            largest = max(float(whole[one].abs().max()) for one in names)
            assert {float(codes[f"{one}_global_scale"][0]) for one in names} == {float(np.float32(448 * 6 / largest))}
            found += 1
    assert found >= 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {}, "add --parts model"),
        ("gemma", {"head_bits": 8}, "has no head of its own"),
        ("mixtral", {"dense_bits": 4}, "has no dense of its own"),
        ("llama", {"parts": "model", "bits": 5}, "expected one of 4, 8, fp8"),
        ("llama", {"parts": "model", "bits": 4, "group_size": 128}, "divides the .* inputs"),
        ("llama", {"parts": "model", "bits": "fp8", "group_size": 64}, "is for whole numbers"),
    ],
)
def test_what_cannot_be_in_codes(plain, tmp_path, name, options, message):
    with pytest.raises(moe_jax.InputError, match=message):
        moe_jax.export(plain(name), tmp_path / "codes", format="compressed-tensors", **options)
    assert not (tmp_path / "codes").exists()
