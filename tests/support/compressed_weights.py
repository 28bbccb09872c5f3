"""Weights in codes, as the package compressed-tensors makes them, and what it decodes them to."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

from moe_jax.conversion.formats import format_of
from moe_jax.conversion.safetensors_file import read_header
from moe_jax.conversion.tensors import TensorEntry, TensorFiles
from tests.support.quantized_checkpoints import Quantise

Args = Mapping[str, Any]


def group(targets: Sequence[str], format: str, **args: Any) -> dict[str, Any]:
    """A group of the config, of weights with these arguments."""
    scheme = QuantizationScheme(targets=list(targets), weights=QuantizationArgs(**args), format=format)
    return scheme.model_dump(mode="json")


def settings(*groups: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """A `quantization_config` with these groups, as the package writes it."""
    formats = sorted({one["format"] for one in groups})
    config = QuantizationConfig(
        config_groups={f"group_{i}": QuantizationScheme(**one) for i, one in enumerate(groups)},
        format=formats[0] if len(formats) == 1 else "mixed-precision",
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    return config.model_dump(mode="json") | others


def in_codes(format: str, *, scales_as: torch.dtype | None = None, **args: Any) -> Quantise:
    """The package's functions for a weight: quantise it in a format, and decode it in float32."""
    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=format)
    compressor = BaseCompressor.get_value_from_registry(format)

    def quantise(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        least, most = _ranges(weight, weights)
        state = {"weight": weight}
        if weights.strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
        scales, zeros = calculate_qparams(least, most, weights, state.get("weight_global_scale"))
        state |= {"weight_scale": scales if scales_as is None else scales.to(scales_as)}
        stored = compressor.compress(state | {"weight_zero_point": zeros}, scheme)
        module = name.removesuffix("weight")
        return {module + part: value for part, value in stored.items()}, _decoded(compressor, stored, scheme)

    return quantise


def _ranges(weight: torch.Tensor, weights: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest entry of all that share a scale."""
    if weights.strategy == "channel":
        parts, axes = weight[:, None], (1, 2)
        return parts.amin(axes)[:, None], parts.amax(axes)[:, None]
    if weights.strategy in ("group", "tensor_group"):
        parts = weight.unflatten(-1, (-1, weights.group_size))
        return parts.amin(-1), parts.amax(-1)
    if weights.strategy == "block":
        rows, columns = weights.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        parts = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return parts.amin((1, 3)), parts.amax((1, 3))
    return weight.min(), weight.max()


def _decoded(compressor: Any, stored: dict[str, torch.Tensor], scheme: QuantizationScheme) -> torch.Tensor:
    """What the package makes of tensors, in float32: it computes in the dtype of the scales."""
    scales = stored["weight_scale"]
    packed = stored.get("weight_packed")
    if packed is not None and packed.dtype == torch.uint8:  # it returns them rounded to bfloat16
        numbers = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
        scales = (decompress_mx_scale(scales) if scales.dtype == torch.uint8 else scales).float()
        whole = stored.get("weight_global_scale")
        return dequantize(numbers, scales, args=scheme.weights, dtype=torch.float32, global_scale=whole)
    if scales.is_floating_point():
        stored = stored | {"weight_scale": scales.float()}
    return compressor.decompress(stored, scheme)["weight"].float()


def folded(folder: pathlib.Path, stored: Mapping[str, torch.Tensor], config: Any) -> dict[str, TensorEntry]:
    """The tensors of a file after those of matrices in codes were replaced, as a `quantization_config` says."""
    file = folder / "model.safetensors"
    save_file({name: value.contiguous() for name, value in stored.items()}, file)
    chosen = format_of({"quantization_config": json.loads(json.dumps(config))})
    assert chosen is not None
    return chosen.folded(read_header(file))


def read_whole(entry: TensorEntry) -> np.ndarray:
    """A tensor, read at once; the same rows are asserted to come out if it is read in pieces."""
    files, rows = TensorFiles(), int(np.prod(entry.shape[:-1]))
    whole = files.rows(entry, 0, rows)
    for step in (1, 7, 33):
        pieces = [files.rows(entry, start, min(start + step, rows)) for start in range(0, rows, step)]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert whole.dtype == np.float32
    return whole.reshape(entry.shape)


def assert_decoded(folder: pathlib.Path, stored: Mapping[str, torch.Tensor], config: Any, expected: Any) -> None:
    """Asserts that nothing but matrices is left of the stored tensors, and that they hold the expected numbers."""
    found = folded(folder, stored, config)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(read_whole(found[name]), np.asarray(values, np.float32), err_msg=name)
