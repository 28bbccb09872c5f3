"""Checkpoints of the package `compressed-tensors`, as LLM Compressor and Kimi write them.

What a matrix [out, in] of a module is stored as, its tensors say:

- `weight_packed` int32: integers of 1 to 8 bits, packed along a row without gaps; `weight_shape`; `weight_scale`; and,
  if they are not symmetric, `weight_zero_point`, packed along a column. `weight_g_idx` has the group of every column.
- `weight_packed` uint8: numbers of four bits. In MXFP4, `weight_scale` is a power of two; in NVFP4, it is in e4m3, and
  is divided by `weight_global_scale`.
- `weight` in int8 or FP8, and `weight_scale`.

Bits, and the entries that share a scale, are in the `config_groups` of config.json.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from moe_jax.conversion.formats.config_groups import DENSE, ConfigGroup, group_for, read_groups
from moe_jax.conversion.formats.container import Container, Kernel, OwnCodes
from moe_jax.conversion.formats.encoders import ENCODERS, NVFP4, Encoder, Quantise, WholeNumbers
from moe_jax.conversion.formats.fp4 import mxfp4_matrix, nvfp4_matrix
from moe_jax.conversion.formats.fp8 import EXPONENTS, FP8_DTYPES, fp8_matrix
from moe_jax.conversion.formats.integer_rows import WORD, IntegerRows
from moe_jax.conversion.formats.quantized_format import CodedMatrix, QuantizationKeys, QuantizedFormat, grid_shape
from moe_jax.conversion.tensors import DTYPES, TensorEntry, TensorFiles
from moe_jax.core.errors import InputError, shown

_WEIGHT = ".weight"


@dataclasses.dataclass(frozen=True)
class CompressedTensors(QuantizedFormat):
    """Attributes:
    groups: of modules whose weights are stored alike.
    """

    methods = ("compressed-tensors",)
    groups: tuple[ConfigGroup, ...]

    @classmethod
    def read(cls, keys: QuantizationKeys) -> "CompressedTensors":
        return cls(read_groups(keys))

    def matrices(self, tensors: Mapping[str, TensorEntry]) -> Iterator[CodedMatrix]:
        files = TensorFiles()
        for name, entry in tensors.items():
            module, _, part = name.rpartition(".")
            matrix = CodedMatrix(module + _WEIGHT, tensors)
            if part == "weight_packed" and entry.dtype == "U8":
                scales = tensors.get(f"{matrix.name}_scale")
                if scales is not None and scales.dtype in EXPONENTS:
                    yield mxfp4_matrix(matrix, name)
                else:
                    yield nvfp4_matrix(matrix, name, f"{matrix.name}_global_scale", divides=True)
            elif part == "weight_packed":
                yield self._packed(matrix, module, files)
            elif part == "weight" and entry.dtype == "I8":
                yield self._integers(matrix, module, matrix.take(name, "I8"), entry.shape)
            elif part == "weight" and entry.dtype in FP8_DTYPES:
                group = group_for(module, [group for group in self.groups if (group.kind, group.bits) == ("float", 8)])
                yield fp8_matrix(matrix, None if group is None else group.block)
            elif part == "weight_scale" and matrix.has(matrix.name) and tensors[matrix.name].dtype in DTYPES:
                yield self._dense(matrix, module)

    def _group_of_integers(self, module: str) -> ConfigGroup | None:
        return group_for(module, [group for group in self.groups if group.kind == "int"])

    def _packed(self, matrix: CodedMatrix, module: str, files: TensorFiles) -> CodedMatrix:
        group = self._group_of_integers(module)
        if group is None:
            raise InputError(
                f"config.json: no group of 'config_groups' has the integers of {matrix.name}; fetch it again"
            )
        codes = matrix.take(f"{matrix.name}_packed", "I32")
        says = matrix.take(f"{matrix.name}_shape", "I64", "I32", shape=[(2,)])
        shape = tuple(int(n) for n in files.rows(says, 0, 1)[0])
        # Of codes that do not fill their last word, only this tensor says how many there are.
        if min(shape) < 0 or codes.shape != (shape[0], math.ceil(shape[1] * group.bits / WORD)):
            raise InputError(
                f"{matrix.name}_packed has shape {shown(list(codes.shape))}, which does not hold the "
                f"{shown(list(shape))} entries of {group.bits} bits that {matrix.name}_shape says"
            )
        return self._integers(matrix, module, codes, shape)

    def _integers(self, matrix: CodedMatrix, module: str, codes: TensorEntry, shape: tuple[int, ...]) -> CodedMatrix:
        """Returns a matrix of integers with its scales, its zero points, and the groups of its columns."""
        if len(shape) != 2:
            raise InputError(f"{matrix.name} has shape {shown(list(shape))}, expected a matrix of integers")
        group = self._group_of_integers(module)
        block = (group and group.block) or (1, max(1, shape[1]))
        grid = grid_shape(shape, block)
        bits = 8 if group is None else group.bits
        scales = matrix.take(f"{matrix.name}_scale", *DTYPES, shape=[grid] if block[0] > 1 else [grid, (), (1,)])
        if scales.shape != grid:
            block = (1, max(1, shape[1]))
        take = matrix.find if group is None or group.is_symmetric else matrix.take
        packed = (math.ceil(shape[0] * bits / WORD), grid[1])
        is_packed = codes.dtype == "I32" and scales.shape == grid
        dtype, expected = ("I32", packed) if is_packed else ("I8", scales.shape)
        zeros = take(f"{matrix.name}_zero_point", dtype, shape=[expected])
        rows = IntegerRows(
            name=matrix.name,
            codes=codes,
            bits=bits,
            columns=shape[1],
            block=block,
            scales=scales,
            zeros=zeros,
            order=matrix.find(f"{matrix.name}_g_idx", "I32", shape=[shape[1:]]),
        )
        return matrix.made(shape, rows, f"int{bits}")

    def _dense(self, matrix: CodedMatrix, module: str) -> CodedMatrix:
        """Returns a matrix that is stored as it is; the scales beside it are left out."""
        group = group_for(module, self.groups)
        if group is not None and group.format not in DENSE:
            raise InputError(
                f"{matrix.name} has dtype {matrix.take(matrix.name, *DTYPES).dtype}, expected codes in the format "
                f"{group.format}, as it has scales; fetch the checkpoint again"
            )
        matrix.entry = matrix.take(matrix.name, *DTYPES)
        for part in ("scale", "zero_point", "global_scale", "g_idx"):
            matrix.find(f"{matrix.name}_{part}", *DTYPES, "I8", "I32", "F8_E4M3")
        return matrix


class InCompressedTensors(Container):
    """This format, as it is written."""

    bits, encoders = (4, 8), ENCODERS

    def whole_numbers(self, bits: int, group_size: int | None, quantise: Quantise) -> WholeNumbers:
        return WholeNumbers(bits=bits, group_size=group_size, quantise=quantise)

    def scales(self, dtype: np.dtype) -> np.dtype:
        return np.dtype(dtype)

    def kept_scales(self, own: OwnCodes, scales: Iterable[np.ndarray]) -> np.dtype | None:
        return np.dtype(np.float32) if own.codes.scale_bits == 32 else None

    def describe(self, encoders: Mapping[str, Encoder], kernels: Iterable[Kernel]) -> dict[str, Any]:
        targets: dict[str, set[str]] = {}
        for kernel in kernels:
            if kernel.part is not None:
                targets.setdefault(kernel.part, set()).add(_target(kernel.template))
        formats = {encoder.format for encoder in encoders.values()}
        groups = {
            f"group_{number}": {
                "targets": sorted(targets[part]),
                "weights": encoder.weights,
                "input_activations": encoder.activations,
                "output_activations": None,
                "format": encoder.format,
            }
            for number, (part, encoder) in enumerate(encoders.items())
        }
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "ignore": [] if "head" in encoders else ["lm_head"],
            "config_groups": groups,
        }

    def notes(self, encoders: Mapping[str, Encoder], dtype: str) -> list[str]:
        made = []
        if len({encoder for part, encoder in encoders.items() if part != "experts"}) > 1:
            made.append(
                "note: Transformers decodes all parts but the experts as one of them is stored; for it, choose one "
                "format for attention, dense FFNs and the head"
            )
        if dtype != "bfloat16" and any(isinstance(encoder, NVFP4) for encoder in encoders.values()):
            made.append(
                f"note: Transformers runs what is in NVFP4 in bfloat16, and the rest of the model is in {dtype}; for "
                "it, add --dtype bfloat16, or load the model with CompressedTensorsConfig(dequantize=True)"
            )
        experts = encoders.get("experts")
        if isinstance(experts, WholeNumbers) and not experts.symmetric:
            made.append("note: Transformers cannot read experts with zero points; for it, export without --zero-points")
        return made


def _target(template: str) -> str:
    """Returns the regular expression of the modules of a table's row."""
    name = template.removesuffix(_WEIGHT)
    if "{e}" in name:  # before it, names differ between a checkpoint and the class that reads it
        name = name[name.index("experts.{e}") :]
    elif "{i}." in name:
        name = name.partition("{i}.")[2]
    return rf"re:.*\b{re.escape(name)}$".replace(r"\{e\}", r"\d+")
