"""Checkpoints of bitsandbytes: the numbers that it decodes them to, logits of Transformers, and faults in one line."""

import functools
import json

import numpy as np
import pytest
import torch
import transformers
from transformers.integrations.bitsandbytes import dequantize_bnb_weight

import moe_jax
from moe_jax.conversion.formats import format_of
from moe_jax.core.errors import InputError
from tests.support.compressed_weights import assert_decoded
from tests.support.faulty_codes import assert_only_input_errors, cast, cut, read, with_first, without
from tests.support.numerics import logits_of
from tests.support.quantized_checkpoints import Quantise, assert_reads_as, plain_checkpoint, write_quantised
from tests.support.tiers import long

functional = pytest.importorskip("bitsandbytes.functional")

MODULE = "model.layers.0.mlp.up_proj"
WEIGHT = f"{MODULE}.weight"
NF4_STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
SCALES = f"{MODULE}.SCB"
TOKENS = [[1, 5, 9, 33, 2, 60, 17, 4, 4, 21, 8, 50]]
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def in_four_bits(kind: str = "nf4", *, blocksize: int = 64, nested: bool = False, **storage: torch.dtype) -> Quantise:
    """The functions of bitsandbytes for a weight: quantise it, and decode it in float32."""

    def quantise(name, weight):
        codes, state = functional.quantize_4bit(
            weight, blocksize=blocksize, quant_type=kind, compress_statistics=nested, **storage
        )
        stored = {name: codes} | {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        # As one row: where blocks go on in the next one, its kernel for CPUs (0.50.2) takes the scales of others. And
        # as an even number of entries, for which nothing is compiled.
        count = weight.numel()
        state.shape, state.dtype = torch.Size([1, count + count % 2]), torch.float32
        values = functional.dequantize_4bit(codes, state).reshape(-1)[:count].reshape(weight.shape)
        return {key: value.clone() for key, value in stored.items()}, values

    return quantise


def in_eight_bits(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    module = name.removesuffix("weight")
    stored = {name: codes, f"{module}SCB": scales, f"{module}weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, functional.int8_vectorwise_dequant(codes, scales)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("shape", "blocksize"), [((75, 48), 64), ((33, 65), 32), ((300, 64), 64), ((3, 5), 128), ((40, 96), 1024)]
)
def test_four_bits(kind, nested, shape, blocksize, tmp_path):
    stored, values = in_four_bits(kind, blocksize=blocksize, nested=nested)(WEIGHT, drawn(*shape))
    assert_decoded(tmp_path, stored, FOUR, {WEIGHT: values})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
def test_codes_that_are_stored_as_numbers_of_other_dtypes(dtype, tmp_path):
    stored, values = in_four_bits(quant_storage=dtype)(WEIGHT, drawn(24, 64))
    assert_decoded(tmp_path, stored, FOUR, {WEIGHT: values})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision(dtype, tmp_path):
    """Which it decodes to their own dtype, after the product in float32."""
    weight = drawn(32, 64).to(dtype)
    stored, values = in_four_bits()(WEIGHT, weight)
    assert_decoded(tmp_path, stored, FOUR, {WEIGHT: values})
    codes, state = functional.quantize_4bit(weight, quant_type="nf4")
    assert torch.equal(values.to(dtype), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("shape", [(40, 24), (7, 33), (1, 5)])
def test_eight_bits(shape, tmp_path):
    stored, values = in_eight_bits(WEIGHT, drawn(*shape))
    assert_decoded(tmp_path, stored, EIGHT, {WEIGHT: values})
    del stored[f"{MODULE}.weight_format"]
    assert_decoded(tmp_path, stored, EIGHT, {WEIGHT: values})


@pytest.mark.parametrize(
    ("name", "quantise", "settings"),
    [
        ("llama", in_four_bits(), FOUR),
        ("mixtral", in_four_bits(nested=True), FOUR),
        ("qwen3_moe", in_four_bits("fp4"), FOUR | {"bnb_4bit_quant_type": "fp4"}),
        ("deepseek_v3", in_eight_bits, EIGHT),
        ("olmoe", in_eight_bits, EIGHT),
    ],
)
def test_models(name, quantise, settings, tmp_path):
    plain = plain_checkpoint(tmp_path / "plain", name)
    assert_reads_as(*write_quantised(plain, tmp_path, quantise, settings), tmp_path)


@pytest.mark.parametrize("load", [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}])
def test_what_transformers_saves_computes_what_it_does(load, tmp_path):
    wide = {"hidden_size": 64, "intermediate_size": 128}  # in rows of whole blocks
    plain = plain_checkpoint(tmp_path / "plain", "llama", **wide)
    settings = transformers.BitsAndBytesConfig(**load)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, quantization_config=settings, device_map="cpu"
    ).eval()
    theirs.save_pretrained(tmp_path / "quantised")
    # Its layers compute in fewer bits than ours.
    for module in (module for module in theirs.modules() if type(module).__name__ in ("Linear4bit", "Linear8bitLt")):
        weight = dequantize_bnb_weight(module.weight, getattr(module, "state", None))
        module.forward = functools.partial(torch.nn.functional.linear, weight=weight.float())
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.float().numpy()
    moe_jax.convert(tmp_path / "quantised", tmp_path / "ours")
    ours = np.asarray(logits_of(moe_jax.load(tmp_path / "ours").decoder, np.asarray(TOKENS, np.int32)))
    np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())


# --- faults ---------------------------------------------------------------------------------------


def written(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    if kind == "int8":
        return in_eight_bits(WEIGHT, drawn(40, 48))[0], EIGHT
    return in_four_bits(nested=kind == "nested")(WEIGHT, drawn(40, 48))[0], FOUR


def with_state(**changed):
    def change(stored):
        state = json.loads(bytes(stored[NF4_STATE].numpy())) | changed
        with_text(json.dumps(state))(stored)

    return change


def with_text(text):
    def change(stored):
        stored[NF4_STATE] = torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())

    return change


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("nf4", without(f"{WEIGHT}.absmax"), "absmax is missing"),
        ("nf4", without(f"{WEIGHT}.quant_map"), "quant_map is missing"),
        ("nf4", without(NF4_STATE), "bitsandbytes__nf4 is missing"),
        ("nf4", without(WEIGHT), "up_proj.weight is missing"),
        ("nf4", cut(WEIGHT), "bytes of codes"),
        ("nf4", cut(f"{WEIGHT}.absmax"), "absmax has shape"),
        ("nf4", cut(f"{WEIGHT}.quant_map"), "quant_map has shape"),
        ("nf4", cast(WEIGHT, torch.int64), "weight has dtype"),
        ("nf4", cast(f"{WEIGHT}.absmax", torch.uint8), "absmax has dtype"),
        ("nf4", with_first(f"{WEIGHT}.absmax", float("nan")), "not finite"),
        ("nf4", with_first(f"{WEIGHT}.quant_map", float("inf")), "not finite"),
        ("nf4", with_text("{'a': 1"), "not valid JSON"),
        ("nf4", with_text("[]"), "expected an object"),
        ("nf4", with_text('{"shape": NaN}'), "not a finite number"),
        ("nf4", with_text(" " * 5000), "at most"),
        ("nf4", with_state(shape=[40, 47]), "bytes of codes"),
        ("nf4", with_state(shape=[1 << 40, 1 << 40]), "'shape'"),
        ("nf4", with_state(shape=[40.0, 48]), "'shape'"),
        ("nf4", with_state(shape=[1920]), "'shape'"),
        ("nf4", with_state(shape=None), "'shape'"),
        ("nf4", with_state(blocksize=63), "'blocksize'"),
        ("nf4", with_state(blocksize=[64]), "'blocksize'"),
        ("nf4", with_state(blocksize=128), "absmax has shape"),
        ("nf4", with_state(quant_type="fp4"), "'quant_type'"),
        ("nested", without(f"{WEIGHT}.nested_absmax"), "absmax has dtype"),
        ("nested", without(f"{WEIGHT}.nested_quant_map"), "nested_quant_map is missing"),
        ("nested", cut(f"{WEIGHT}.nested_quant_map"), "nested_quant_map has shape"),
        ("nested", with_first(f"{WEIGHT}.nested_absmax", float("nan")), "not finite"),
        ("nested", with_state(nested_offset="x"), "'nested_offset'"),
        ("nested", with_state(nested_blocksize=0), "'nested_blocksize'"),
        ("int8", without(SCALES), "SCB is missing"),
        ("int8", cut(SCALES), "SCB has shape"),
        ("int8", cut(WEIGHT), "SCB has shape"),
        ("int8", with_first(SCALES, float("nan")), "not finite"),
        ("int8", with_first(f"{MODULE}.weight_format", 3), "weight_format is 3"),
        ("int8", lambda stored: stored.update({WEIGHT: stored[WEIGHT][0]}), "expected a matrix"),
    ],
)
def test_faults_of_tensors(kind, change, message, tmp_path):
    stored, config = written(kind)
    read(tmp_path, stored, config)
    change(stored)
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, stored, config)
    assert "\n" not in str(caught.value)


def test_a_fault_of_the_config():
    with pytest.raises(InputError, match="load_in_4bit"):
        format_of({"quantization_config": FOUR | {"load_in_4bit": 3}})


def test_mutations_are_read_or_refused(tmp_path):
    assert_only_input_errors(tmp_path, written, ["nf4", "nested", "int8"], range(100))


@long
def test_many_mutations_are_read_or_refused(tmp_path):
    assert_only_input_errors(tmp_path, written, ["nf4", "nested", "int8"], range(100, 2000))
