"""Matrices in NVFP4 or FP8 as NVIDIA's Model Optimizer stores them (package `nvidia-modelopt`).

- NVFP4: `weight` UInt8[out, in / 2], `weight_scale` [out, in / 16] in e4m3, and `weight_scale_2`, a float32 by which
  those scales are multiplied.
- FP8: `weight` [out, in] in e4m3, and `weight_scale`, one float32.

Both may be in one checkpoint: the dtype of a matrix says how it is stored.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from moe_jax.conversion.formats.fp4 import nvfp4_matrix
from moe_jax.conversion.formats.fp8 import FP8_DTYPES, fp8_matrix
from moe_jax.conversion.formats.quantized_format import CodedMatrix, QuantizationKeys, QuantizedFormat
from moe_jax.conversion.tensors import TensorEntry

_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")


@dataclasses.dataclass(frozen=True)
class ModelOpt(QuantizedFormat):
    """Attributes:
    algorithm: the `quant_algo` of config.json.
    """

    methods = ("modelopt", "modelopt_fp4")
    algorithm: str

    @classmethod
    def read(cls, keys: QuantizationKeys) -> "ModelOpt":
        is_fp4 = keys.data.get("quant_method") == "modelopt_fp4"
        return cls(keys.choice("quant_algo", _ALGORITHMS, default="NVFP4" if is_fp4 else None))

    def matrices(self, tensors: Mapping[str, TensorEntry]) -> Iterator[CodedMatrix]:
        for name, entry in tensors.items():
            if not name.endswith(".weight"):
                continue
            if entry.dtype == "U8":
                yield nvfp4_matrix(CodedMatrix(name, tensors), name, f"{name}_scale_2", divides=False)
            elif entry.dtype in FP8_DTYPES:
                yield fp8_matrix(CodedMatrix(name, tensors), None)
