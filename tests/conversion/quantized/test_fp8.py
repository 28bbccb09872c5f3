"""FP8 checkpoints: the numbers and logits of Transformers, and faults in one line."""

import json
import re

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

import moe_jax
from moe_jax.commands.cli import main
from moe_jax.conversion.formats import FORMATS
from moe_jax.conversion.formats.quantized_format import QuantizationKeys
from moe_jax.conversion.safetensors_file import read_header
from moe_jax.conversion.tensors import TensorFiles
from tests.support.numerics import logits_of
from tests.support.quantized_checkpoints import assert_reads_as, is_quantised, plain_checkpoint, write_quantised

TOKENS = [[1, 5, 9, 33, 2, 60, 17, 4, 4, 21, 8, 50]]


class _Quantizer:
    def __init__(self, settings):
        self.quantization_config = transformers.FineGrainedFP8Config(**settings)


def in_fp8(settings):
    """The functions of Transformers for a weight: quantise it, and decode it."""
    writer, reader = Fp8Quantize(_Quantizer(settings)), Fp8Dequantize(_Quantizer(settings))

    def quantise(name, weight):
        stored = writer._quantize_one(name, weight)
        if len(stored) == 1:  # it leaves those whose blocks would be cut off as they are
            return stored, weight
        codes, scales = stored[name], stored[f"{name}_scale_inv"]
        return stored, reader._dequantize_one(codes, scales, torch.float32)

    return quantise


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("block", [(8, 16), (16, 8)])
def test_blocks_are_decoded_as_transformers_decodes_them(name, block, tmp_path):
    settings = {"weight_block_size": block}
    both = write_quantised(
        plain_checkpoint(tmp_path / "plain", name),
        tmp_path,
        in_fp8(settings),
        transformers.FineGrainedFP8Config(**settings).to_dict(),
    )
    model = assert_reads_as(*both, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(both[0], dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    ours = np.asarray(logits_of(moe_jax.load(model).decoder, np.asarray(TOKENS, np.int32)))
    np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())


def test_one_scale_for_all_and_one_for_a_row(tmp_path):
    """As `FineGrainedFP8Config` without blocks writes it, and `fbgemm_fp8`."""
    plain = plain_checkpoint(tmp_path / "plain", "llama")

    def by_row(name, weight):
        if "down" in name:
            return in_fp8({"weight_block_size": None})(name, weight)
        scale = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale": scale}, codes.to(torch.float32) * scale

    assert_reads_as(*write_quantised(plain, tmp_path, by_row, {"quant_method": "fbgemm_fp8"}), tmp_path)


def test_blocks_that_are_cut_off_and_exponents_as_scales(tmp_path):
    """DeepSeek's `kv_a_proj_with_mqa` has 576 rows, in blocks of 128; Transformers refuses to decode that."""
    plain = plain_checkpoint(tmp_path / "plain", "deepseek_v3")

    def quantise(name, weight):
        rows, columns = weight.shape
        scales = torch.rand(-(-rows // 24), -(-columns // 20)) + 0.01
        if "mlp" in name:  # as MXFP8 stores them
            exponents = torch.randint(110, 130, scales.shape, dtype=torch.uint8)
            scales = torch.exp2(exponents.to(torch.float32) - 127)
        spread = scales.repeat_interleave(24, 0).repeat_interleave(20, 1)[:rows, :columns]
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = exponents if "mlp" in name else scales
        return {name: codes, f"{name}_scale_inv": stored}, codes.to(torch.float32) * spread

    settings = {"quant_method": "fp8", "weight_block_size": [24, 20]}
    assert_reads_as(*write_quantised(plain, tmp_path, quantise, settings), tmp_path)


def test_fused_experts(tmp_path):
    """Blocks begin anew in every expert: three of 40 rows have two blocks of 32 each, the second cut off."""
    codes = torch.randn(3, 40, 24).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 2)
    save_file(
        {"e.up": codes, "e.up_scale_inv": scales, "e.up_input_scale": torch.ones(1)}, tmp_path / "one.safetensors"
    )
    folded = (
        FORMATS["fp8"]
        .read(QuantizationKeys({"weight_block_size": [32, 16]}))
        .folded({**read_header(tmp_path / "one.safetensors")})
    )
    spread = scales.repeat_interleave(32, 1)[:, :40].repeat_interleave(16, 2)[..., :24]
    expected = (codes.to(torch.float32) * spread).numpy().reshape(120, 24)
    np.testing.assert_array_equal(TensorFiles().rows(folded["e.up"], 7, 118), expected[7:118])


LEFT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.fixture(scope="module")
def partly_in_fp8(tmp_path_factory):
    """A checkpoint of whose experts a list skips one, and what it is decoded to."""
    folder = tmp_path_factory.mktemp("partly")
    settings = {"quant_method": "fp8", "weight_block_size": [8, 8], "modules_to_not_convert": [LEFT[:-7]]}
    return write_quantised(
        plain_checkpoint(folder / "plain", "mixtral"),
        folder,
        in_fp8({"weight_block_size": (8, 8)}),
        settings,
        lambda name, weight: is_quantised(name, weight) and name != LEFT,
    )


def test_experts_that_are_whole_beside_others_are_noticed(partly_in_fp8, tmp_path, capfd):
    assert_reads_as(*partly_in_fp8, tmp_path)
    assert main(["convert", str(partly_in_fp8[0]), str(tmp_path / "out"), "--dry-run"]) == 0
    said = capfd.readouterr().out
    assert f"note: not in codes: 1 of 4 experts of layers/1/mlp/experts/gate/kernel, such as {LEFT}" in said
    assert "fp8 -> float32" in said


def test_a_plan_says_what_the_checkpoint_holds(partly_in_fp8, tmp_path, capfd):
    """Of 3 layers with 4 projections and 12 matrices of experts, one of them whole; or what the config alone says."""
    folder, decoded = partly_in_fp8
    assert main(["plan", str(folder)]) == 0
    said = capfd.readouterr().out
    assert "quantised: 47 in fp8; 13 tensors are not in codes; training starts from decoded weights\n" in said
    assert f"note: not in codes: 1 of 4 experts of layers/1/mlp/experts/gate/kernel, such as {LEFT}" in said
    assert main(["plan", str(folder), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["quantized"] == {"fp8": 47}
    for alone in (folder / "config.json", tmp_path):
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        assert main(["plan", str(alone)]) == 0
        assert "quantised: as config.json says; training" in capfd.readouterr().out
    assert main(["plan", str(decoded)]) == 0
    assert "quantised" not in capfd.readouterr().out


def faulty(plain, folder, change):
    settings = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    quantised, _ = write_quantised(plain, folder, in_fp8({"weight_block_size": (8, 8)}), settings)
    tensors, config = load_file(quantised / "model.safetensors"), json.loads((quantised / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})
    (quantised / "config.json").write_text(json.dumps(config))
    return quantised


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: t.pop(f"{Q}_scale_inv"), "q_proj.weight_scale is missing"),
        (lambda t, c: t.update({f"{Q}_scale_inv": torch.ones(4, 3)}), "has shape .*, expected"),
        (lambda t, c: t.update({f"{Q}_scale_inv": torch.full((4, 4), torch.nan)}), "that are not finite"),
        (lambda t, c: t.update({Q: torch.zeros(24, 32).to(torch.float8_e4m3fn)}), "has shape"),
        (lambda t, c: t.update({Q: torch.zeros(32).to(torch.float8_e4m3fn)}), "expected a matrix"),
        (lambda t, c: t.update({f"{Q}_scale_inv": torch.ones(4, 4, dtype=torch.int32)}), "has dtype I32"),
        (lambda t, c: c["quantization_config"].update(quant_method="fp9"), "did you mean 'fp8'"),
        (lambda t, c: c["quantization_config"].update(quant_method=8), "unknown 'quant_method' 8"),
        (lambda t, c: c["quantization_config"].update(weight_block_size=[0, 8]), "two sizes of"),
        (lambda t, c: c.update(quantization_config=["fp8"]), "expected an object"),
        (lambda t, c: c.pop("quantization_config"), "has no 'quantization_config'"),
    ],
)
def test_faults_are_one_line_and_leave_nothing(llama_in_fp8, tmp_path, capfd, change, message):
    quantised = faulty(llama_in_fp8, tmp_path / "faulty", change)
    assert main(["convert", str(quantised), str(tmp_path / "out")]) == 2
    said = capfd.readouterr().err.splitlines()
    assert re.search(message, said[-1]) and [line for line in said if "error" in line] == said[-1:]
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def llama_in_fp8(tmp_path_factory):
    """The plain checkpoint of which faulty ones are made."""
    return plain_checkpoint(tmp_path_factory.mktemp("plain"), "llama")
