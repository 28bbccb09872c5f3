"""Models in GPTQ's codes: what is written is read as the very numbers that were meant, and codes that fit stay."""

import json
import pathlib
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers.quantizers.auto import AutoQuantizationConfig

import moe_jax
from moe_jax.api.transforms import _codes
from moe_jax.commands.cli import main
from moe_jax.conversion.formats.gptq import GPTQ, GPTQNumbers
from moe_jax.conversion.formats.quantized_format import QuantizationKeys
from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory
from moe_jax.conversion.safetensors_file import read_header
from moe_jax.conversion.tensors import TensorFiles
from moe_jax.experts.forms import ffn_matrices
from moe_jax.experts.on_host import expert_kernels
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.packed_weights import awq_settings, gptq_settings, in_awq, in_gptq
from tests.support.quantized_checkpoints import plain_checkpoint, write_quantised
from tests.support.tiers import one_in

WIDE = {"hidden_size": 64, "intermediate_size": 96}
FLOAT16 = np.dtype(np.float16)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """name -> a small random model, as a Hugging Face directory."""
    root = tmp_path_factory.mktemp("plain")

    def make(name: str) -> pathlib.Path:
        folder = root / name
        return folder if folder.exists() else plain_checkpoint(folder, name, **WIDE)

    return make


def settings_of(folder: pathlib.Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def experts_of(model: pathlib.Path) -> dict[str, np.ndarray]:
    """The kernels of all experts of a model directory, made whole, by the names of their leaves."""
    source, found = ModelDirectory(model), {}
    for i in source.config.moe_layers:
        moe, bank = source.config.moe(i), f"layers/{i}/mlp/experts"
        for name, matrix in ffn_matrices(moe.expert, source.config.d_model).items():
            made = expert_kernels(
                source.read, moe.bank, bank, matrix, dtype=np.dtype(np.float32), experts=range(moe.routed_experts)
            )
            found[f"{bank}/{name}/kernel"] = np.stack(list(made))
    return found


# --- a matrix -------------------------------------------------------------------------------------


@one_in(3)
@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize(("bits", "symmetric"), [(2, True), (3, True), (4, True), (8, True), (3, False), (4, False)])
def test_our_reader_decodes_what_the_encoder_meant(bits, symmetric, group_size, tmp_path):
    matrix = (0.1 * np.random.default_rng(0).standard_normal((64, 96))).astype(np.float32)
    matrix[1], matrix[2] = 0, 1e-6 * matrix[2]  # of which float16 has no scales, or bad ones
    encoder = GPTQNumbers(bits=bits, group_size=group_size, quantise=_codes, symmetric=symmetric)
    made, planned = encoder.encoded(matrix, FLOAT16), encoder.planned(matrix.shape, FLOAT16)
    named = {encoder.name_of("m.weight", ending): values for ending, values in made.tensors.items()}
    save_file({name: np.ascontiguousarray(values) for name, values in named.items()}, tmp_path / "one.safetensors")
    stored = read_header(tmp_path / "one.safetensors")
    assert {name: entry.shape for name, entry in stored.items()} == {
        f"m{ending}": tensor.shape for ending, tensor in planned.items()
    }
    given = {"bits": bits, "group_size": group_size or -1}
    entry = GPTQ.read(QuantizationKeys(given)).folded(stored)["m.weight"]
    np.testing.assert_array_equal(TensorFiles().rows(entry, 0, 64), made.decoded)
    assert np.linalg.norm(made.decoded - matrix) < {2: 0.5, 3: 0.25, 4: 0.12, 8: 0.01}[bits] * np.linalg.norm(matrix)


@pytest.mark.parametrize(
    ("shape", "bits", "message"),
    [((64, 48), 3, "48 inputs of 3"), ((44, 64), 4, "44 outputs of 4"), ((64, 80), 4, "do not divide 80")],
)
def test_matrices_that_do_not_fill_words_or_groups(shape, bits, message):
    with pytest.raises(moe_jax.InputError, match=message):
        GPTQNumbers(bits=bits, group_size=32, quantise=_codes).planned(shape, FLOAT16)


def test_scales_beyond_float16():
    encoder = GPTQNumbers(bits=2, group_size=None, quantise=_codes)
    with pytest.raises(moe_jax.InputError, match="fit in float16"):
        encoder.encoded(np.full((16, 32), 1e6, np.float32), FLOAT16)


# --- models ---------------------------------------------------------------------------------------


@one_in(2)
@pytest.mark.parametrize(
    ("name", "options", "packings"),
    [
        ("mixtral", {"bits": 3, "parts": "model", "attention_bits": 8}, {"experts.1.w1": 3, "q_proj": 8}),
        ("mixtral", {"bits": 2}, {"experts.0.w2": 2, "q_proj": None, "block_sparse_moe.gate": None}),
        ("llama", {"parts": "model", "head_bits": 8}, {"q_proj": 4, "mlp.up_proj": 4, "lm_head": 8}),
        (
            "deepseek_v3",
            {"bits": 8, "parts": "model", "dense_bits": 4},
            {"0.mlp.up_proj": 4, "experts.1.up_proj": 8, "shared_experts.down_proj": 4, "kv_b_proj": 8},
        ),
    ],
)
def test_every_module_has_the_packing_that_the_config_says(plain, tmp_path, name, options, packings, capfd):
    flags = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    out = tmp_path / "codes"
    assert main(["export", str(plain(name)), str(out), "--format", "gptq", *flags]) == 0
    said = capfd.readouterr().err
    assert "rounded" in said and "codes changed, of the norm of the weights: " in said
    settings = settings_of(out)
    assert settings["checkpoint_format"] == "gptq" and settings["sym"] and not settings["desc_act"]
    theirs = AutoQuantizationConfig.from_dict(settings)
    assert (theirs.bits, theirs.group_size, theirs.quant_method.value) == (
        settings["bits"],
        settings["group_size"],
        "gptq",
    )
    tensors = load_file(out / "model.safetensors")
    modules = {tensor.rpartition(".")[0] for tensor in tensors}
    for module, bits in packings.items():
        assert any(one.endswith(module) for one in modules)
        for one in modules:
            if one.endswith(module):
                codes = tensors.get(f"{one}.qweight")
                assert bits == (None if codes is None else 32 * len(codes) // len(tensors[f"{one}.g_idx"])), one
    # By the rules of GPTQModel: the first that matches holds.
    for module in modules:
        rule = next((rule for rule in settings["dynamic"] if re.match(rule[2:], module)), "")
        codes = tensors.get(f"{module}.qweight")
        if codes is not None:
            said = settings | settings["dynamic"].get(rule, {})
            assert not rule.startswith("-:"), module
            assert said["bits"] == 32 * len(codes) // len(tensors[f"{module}.g_idx"]), module
        elif module.endswith(("proj", "gate", "lm_head", "w1", "w2", "w3")):
            assert rule.startswith("-:"), module
    source, whole = HuggingFaceDirectory(out), HuggingFaceDirectory(plain(name))
    for path in whole.specs():
        kept, rounded = whole.read(path), source.read(path)
        assert np.linalg.norm(rounded - kept) <= 0.6 * np.linalg.norm(kept), path


def test_modules_that_vllm_joins_have_the_rules_of_their_parts(plain, tmp_path):
    moe_jax.export(plain("mixtral"), tmp_path / "codes", format="gptq")
    rules = settings_of(tmp_path / "codes")["dynamic"]

    def is_whole(module: str) -> bool:
        return any(re.match(rule.removeprefix("-:"), module) for rule in rules)

    assert is_whole("model.layers.0.self_attn.qkv_proj") and is_whole("model.layers.1.block_sparse_moe.gate")
    assert not is_whole("model.layers.0.block_sparse_moe.experts")
    assert not is_whole("model.layers.0.block_sparse_moe.experts.1.w1")


# --- codes that stay ------------------------------------------------------------------------------


@one_in(2)
@pytest.mark.parametrize(("bits", "dtype"), [(2, "float32"), (3, "bfloat16"), (4, "float32"), (8, "bfloat16")])
def test_plain_codes_leave_as_they_are_and_come_back(plain, tmp_path, bits, dtype, capfd):
    moe_jax.convert(plain("mixtral"), tmp_path / "model", dtype=dtype)
    small = tmp_path / "small"
    moe_jax.compress(tmp_path / "model", small, method="quantize", bits=bits, group_size=16, levels="even")
    assert main(["export", str(small), str(tmp_path / "codes"), "--format", "gptq"]) == 0
    said = capfd.readouterr().err
    assert f"experts are in {bits} bits, 16 inputs to a scale: the codes that they have" in said
    assert "rounding changed" not in said
    moe_jax.convert(tmp_path / "codes", kept := tmp_path / "kept", codes="keep")
    first, second = ModelDirectory(small), ModelDirectory(kept)
    paths = [path for path in first.specs() if path.endswith(("/codes", "/scales"))]
    assert paths
    for path in paths:
        ours = second.read(path).astype(np.float32) if path.endswith("/scales") else second.read(path)
        np.testing.assert_array_equal(ours, first.read(path), err_msg=path)
    for path, kernels in experts_of(small).items():
        np.testing.assert_array_equal(HuggingFaceDirectory(tmp_path / "codes").read(path), kernels, err_msg=path)


@one_in(2)
@pytest.mark.parametrize(
    ("quantise", "settings", "written"),
    [
        (in_gptq(), gptq_settings(), "gptq_v2"),  # a zero point of some groups is 0
        (in_gptq(3, 16, version="gptq_v2"), gptq_settings(3, checkpoint_format="gptq_v2"), "gptq_v2"),
        (in_gptq(8, -1), gptq_settings(8, -1), "gptq"),
        (in_awq(32), awq_settings(32), "gptq_v2"),
    ],
    ids=["gptq", "gptq in 3 bits", "gptq in rows", "awq"],
)
def test_codes_of_gptq_and_awq_go_out_again(tmp_path, quantise, settings, written):
    folder, _ = write_quantised(plain_checkpoint(tmp_path / "plain", "mixtral", **WIDE), tmp_path, quantise, settings)
    moe_jax.convert(folder, kept := tmp_path / "kept", codes="keep")
    moe_jax.export(kept, out := tmp_path / "out", format="gptq")
    assert settings_of(out)["checkpoint_format"] == written and not settings_of(out)["sym"]
    assert settings_of(out)["group_size"] == settings["group_size"]
    moe_jax.convert(out, again := tmp_path / "again", codes="keep")
    for path in ModelDirectory(kept).specs():
        first, second = (ModelDirectory(where).read(path) for where in (kept, again))
        np.testing.assert_array_equal(first, second, err_msg=path)
    if settings["quant_method"] == "gptq":
        first, second = (load_file(where / "model.safetensors") for where in (folder, out))
        same = [name for name in first if ".experts." in name and not name.endswith(".qzeros")]
        assert same
        for name in same:
            assert first[name].dtype == second[name].dtype
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize(("scale_bits", "dtype"), [(16, "BF16"), (32, "F32")])
def test_scales_that_float16_has_not_keep_their_dtype(plain, tmp_path, scale_bits, dtype):
    """Those of tiny weights: they are below its smallest normal number."""
    weights, config = load_file(plain("mixtral") / "model.safetensors"), plain("mixtral") / "config.json"
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_bytes(config.read_bytes())
    tiny = {name: 1e-4 * weight if ".experts." in name else weight for name, weight in weights.items()}
    save_file(tiny, tmp_path / "tiny" / "model.safetensors")
    small, out = tmp_path / "small", tmp_path / "out"
    options = {"method": "quantize", "bits": 4, "group_size": 16, "levels": "even", "scale_bits": scale_bits}
    moe_jax.compress(tmp_path / "tiny", small, **options)
    moe_jax.export(small, out, format="gptq")
    stored = read_header(out / "model.safetensors")
    assert {entry.dtype for name, entry in stored.items() if name.endswith(".scales")} == {dtype}
    for path, kernels in experts_of(small).items():
        np.testing.assert_array_equal(HuggingFaceDirectory(out).read(path), kernels, err_msg=path)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "gptq", "bits": "fp8"}, "--format compressed-tensors$"),
        ({"format": "gptq", "attention_bits": "nvfp4"}, "--attention-bits .*--format compressed-tensors$"),
        ({"format": "gptq", "bits": 5}, "expected one of 2, 3, 4, 8$"),
        ({"format": "compressed-tensors", "bits": 2}, "--format gptq$"),
        ({"format": "compressed-tensors", "head_bits": 3}, "--head-bits .*--format gptq$"),
        ({"bits": 3}, "--format compressed-tensors or gptq"),
    ],
)
def test_numbers_that_a_format_has_not(options, message):
    with pytest.raises(moe_jax.InputError, match=message):
        moe_jax.ExportSpec(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_layout": "fused"}, "takes a matrix for"),
        ({"group_size": 24}, "the format has whole groups"),
    ],
)
def test_what_cannot_be_written(plain, tmp_path, options, message):
    with pytest.raises(moe_jax.InputError, match=message):
        moe_jax.export(plain("mixtral"), tmp_path / "codes", format="gptq", **options)
    assert not (tmp_path / "codes").exists()
