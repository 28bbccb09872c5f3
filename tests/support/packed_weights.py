"""Weights as GPTQ and AWQ store them, written by the rules of the formats, and what they are decoded to.

Their own functions compute with words and shifts; here codes are laid out as a stream of bits.
"""

import math
from typing import Any

import numpy as np
import torch

from tests.support.quantized_checkpoints import Quantise

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The outputs whose codes a word has, from its lowest bits on."""


def in_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes [n, m] along their rows, without gaps, in Int32[n, m * bits / 32]."""
    single = np.unpackbits(codes.to(torch.uint8).numpy()[..., None], axis=-1, count=bits, bitorder="little")
    stream = single.reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=-1, bitorder="little").view("<i4").copy())


def rounded(weight: torch.Tensor, bits: int, groups: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Codes Int[out, in], scales [groups, out], zero points Int[groups, out], and the values they stand for.

    `groups` has that of every input. Of every other group, all weights are positive, so its zero point is 0.
    """
    most, count = (1 << bits) - 1, int(groups.max()) + 1
    scales, zeros = torch.empty(count, len(weight)), torch.empty(count, len(weight))
    for group in range(count):
        part = weight[:, groups == group]
        part = part.abs() if group % 2 else part
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[group] = ((high - low) / most).to(dtype).float()
        zeros[group] = torch.round(-low / scales[group])
    scale, zero = scales[groups].T, zeros[groups].T
    codes = torch.clamp(torch.round(weight / scale) + zero, 0, most)
    return codes, scales.to(dtype), zeros, (codes - zero) * scale


def in_gptq(
    bits: int = 4,
    group_size: int = 16,
    *,
    version: str = "gptq",
    desc_act: bool = False,
    order: bool = True,
    dtype: torch.dtype = torch.float16,
) -> Quantise:
    """Quantises a weight [out, in] as GPTQ stores it."""

    def quantise(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs = weight.shape[1]
        groups = torch.arange(inputs) // (inputs if group_size == -1 else group_size)
        if desc_act:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
        codes, scales, zeros, values = rounded(weight, bits, groups, dtype)
        module = name.removesuffix("weight")
        stored = {
            f"{module}qweight": in_words(codes, bits).T.contiguous(),
            f"{module}qzeros": _one_less(zeros, bits) if version == "gptq" else in_words(zeros, bits),
            f"{module}scales": scales,
        }
        return stored | ({f"{module}g_idx": groups.to(torch.int32)} if order else {}), values

    return quantise


def _one_less(zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """As GPTQModel writes them: one is taken from every field, of a whole word at once where fields fill words."""
    if bits == 3:
        return in_words((zeros - 1) % 8, bits)
    ones = in_words(torch.ones(1, 32 // bits), bits).item()
    return in_words(zeros, bits) - ones


def gptq_settings(bits: int = 4, group_size: int = 16, **others: Any) -> dict[str, Any]:
    """A `quantization_config` with the keys that GPTQModel and Transformers write."""
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False, "sym": False,
        "checkpoint_format": "gptq", "damp_percent": 0.01, "lm_head": False, "true_sequential": True,
        "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:5.0.0"]},
    } | others  # fmt: skip


def in_awq(group_size: int = 16, *, version: str = "gemm", dtype: torch.dtype = torch.float16) -> Quantise:
    """Quantises a weight [out, in] as AWQ stores it, in four bits."""

    def quantise(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs = weight.shape[1]
        size = inputs if group_size == -1 else group_size
        codes, scales, zeros, values = rounded(weight, 4, torch.arange(inputs) // size, dtype)
        if version == "gemm":
            parts = (in_words(_mixed(codes.T), 4), in_words(_mixed(zeros), 4), scales)
        else:  # with place for groups that there are not
            at_once = 8 * {64: 2, 32: 4}.get(size, 1)
            missing = math.ceil(len(zeros) / at_once) * at_once - len(zeros)
            filled = [torch.nn.functional.pad(part.T, (0, missing)) for part in (zeros, scales)]
            parts = (in_words(codes, 4), in_words(filled[0], 4), filled[1])
        module = name.removesuffix("weight")
        return dict(zip([f"{module}qweight", f"{module}qzeros", f"{module}scales"], parts, strict=True)), values

    return quantise


def _mixed(codes: torch.Tensor) -> torch.Tensor:
    return codes.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)


def awq_settings(group_size: int = 16, **others: Any) -> dict[str, Any]:
    """A `quantization_config` with the keys that AutoAWQ writes."""
    return {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    } | others  # fmt: skip
