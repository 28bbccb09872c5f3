"""Numbers of a matrix in codes: what the package compressed-tensors decodes is what our encoders say they stand for."""

from typing import get_args

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme

from moe_jax.api.transforms import _codes
from moe_jax.conversion.formats.coded_parts import CONTAINERS
from moe_jax.conversion.formats.encoders import FP8, MXFP4, NVFP4, FP8Blocks, WholeNumbers
from moe_jax.conversion.formats.fp4 import FP4_LEVELS
from moe_jax.conversion.spec import CODES_OF, Code
from moe_jax.core.errors import InputError

FLOAT32 = np.dtype(np.float32)
ENCODERS = {
    "int4": WholeNumbers(bits=4, group_size=32, quantise=_codes),
    "int4 rows": WholeNumbers(bits=4, group_size=None, quantise=_codes),
    "int8": WholeNumbers(bits=8, group_size=32, quantise=_codes),
    "fp8": FP8(),
    "fp8 blocks": FP8Blocks(block=(24, 40)),
    "nvfp4": NVFP4(),
    "mxfp4": MXFP4(),
}


def awkward(rows, columns):
    """Numbers of many sizes: a row of zeros, one of next to nothing, and a group of large ones."""
    rng = np.random.default_rng(0)
    matrix = (0.1 * rng.standard_normal((rows, columns))).astype(np.float32)
    matrix[1] = 0
    matrix[2] *= 1e-4
    matrix[3, :32] *= 100
    return matrix


def as_tensor(array):
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(np.ascontiguousarray(array))


@pytest.mark.parametrize("shape", [(40, 96), (37, 160)])
@pytest.mark.parametrize("name", ENCODERS)
def test_the_package_decodes_what_was_encoded(name, shape):
    encoder, matrix = ENCODERS[name], awkward(*shape)
    made = encoder.encoded(matrix, FLOAT32)
    planned = encoder.planned(shape, FLOAT32)
    assert {ending: tensor.shape for ending, tensor in planned.items()} == {
        ending: values.shape for ending, values in made.tensors.items()
    }
    args = QuantizationArgs(**encoder.weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=encoder.format)
    tensors = {f"weight{ending}": as_tensor(values) for ending, values in made.tensors.items()}
    if name == "fp8 blocks" and shape[0] % 24:
        pytest.skip("the package decodes whole blocks only")
    decoded = BaseCompressor.get_value_from_registry(encoder.format).decompress(tensors, scheme)["weight"]
    # NVFP4 is decoded in bfloat16 there.
    expected = made.decoded.astype(ml_dtypes.bfloat16) if decoded.dtype == torch.bfloat16 else made.decoded
    np.testing.assert_array_equal(decoded.to(torch.float32).numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks", "mxfp4", "nvfp4"])
def test_errors_are_those_of_the_numbers(name):
    """Of FP8 2^-4 of a number, or half of the smallest step; of e2m1 half of the largest step, and of the scale's."""
    matrix = awkward(48, 160)
    error = np.abs(ENCODERS[name].encoded(matrix, FLOAT32).decoded - matrix)
    blocks = {"fp8": (1, 160), "fp8 blocks": (24, 40), "nvfp4": (1, 16), "mxfp4": (1, 32)}[name]
    by_block = np.abs(matrix).reshape(48 // blocks[0], blocks[0], -1, blocks[1]).max((1, 3))
    most = by_block.repeat(blocks[0], 0).repeat(blocks[1], 1)
    if name.startswith("fp8"):
        bound = np.maximum(np.abs(matrix) / 16, most / 448 / 2**10)
    elif name == "mxfp4":  # numbers are below 7 steps, and steps are of two at most
        bound = most / 3.5
    else:  # scales of small groups have few bits, or are zero, beside a large one
        bound = most * (1 / 6 + 1 / 8) + np.abs(matrix).max() / 448 / 6
    assert (error <= bound * (1 + 1e-6)).all()
    assert not error[1].any()


@pytest.mark.parametrize("name", ["int4", "int4 rows", "int8"])
def test_whole_numbers_lose_no_more_than_by_the_largest_magnitude(name):
    matrix = awkward(48, 160)
    encoder = ENCODERS[name]
    groups = matrix.reshape(48, -1, encoder.group_size or 160)
    steps = np.abs(groups).max(-1, keepdims=True) / (2 ** (encoder.bits - 1) - 1)
    rounded = np.round(groups / np.where(steps > 0, steps, 1)) * steps
    error = (encoder.encoded(matrix, FLOAT32).decoded - matrix).reshape(groups.shape)
    ours, simple = (error**2).sum(-1), ((rounded - groups) ** 2).sum(-1)
    assert ours.sum() <= simple.sum()
    if encoder.bits == 4:  # beside codes of eight bits, scales of bfloat16 are coarse, and a group may be unlucky
        assert (ours <= 1.001 * simple + 1e-12).all()


def test_e2m1_is_rounded_to_the_nearest():
    encoder, matrix = MXFP4(), np.zeros((1, 32), np.float32)
    matrix[0, :20] = [6, 5.1, 4.9, 3.6, 3.4, 2.6, 2.4, 1.8, 1.7, 1.3, 1.2, 0.8, 0.7, 0.3, 0.2, -6, -0.8, -0.2, 4, 0.5]
    signed = np.concatenate([-FP4_LEVELS[::-1], FP4_LEVELS])
    nearest = signed[np.abs(matrix[0][:, None] - signed).argmin(1)]
    np.testing.assert_array_equal(np.abs(encoder.encoded(matrix, FLOAT32).decoded[0]), np.abs(nearest))


@pytest.mark.parametrize(
    ("code", "preset"),
    [("fp8", "FP8_DYNAMIC"), ("fp8-block", "FP8_BLOCK"), ("nvfp4", "NVFP4A16"), ("mxfp4", "MXFP4A16")],
)
def test_formats_are_the_presets_that_vllm_knows(code, preset):
    encoder, known = CONTAINERS["compressed-tensors"].encoders[code](), preset_name_to_scheme(preset, ["Linear"])
    ours = QuantizationScheme(targets=["Linear"], weights=encoder.weights, input_activations=encoder.activations)
    defaults = dict.fromkeys(("observer", "actorder", "zp_dtype"))  # of no use to who reads them
    for side in ("weights", "input_activations"):
        mine, theirs = getattr(ours, side), getattr(known, side)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.model_copy(update=defaults) == theirs.model_copy(update=defaults)


def test_the_command_line_has_all():
    """It is read before NumPy's formats are imported."""
    found = {name: (*map(str, one.bits), *one.encoders) for name, one in CONTAINERS.items()}
    assert found == CODES_OF and set(get_args(Code)) == {code for codes in found.values() for code in codes}


@pytest.mark.parametrize("name", ["int4", "int8", "nvfp4", "mxfp4"])
def test_rows_that_groups_do_not_divide_are_refused(name):
    with pytest.raises(InputError, match="divide 40$"):
        ENCODERS[name].planned((8, 40), FLOAT32)
