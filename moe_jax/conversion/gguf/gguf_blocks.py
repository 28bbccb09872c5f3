"""The types in which GGUF files store tensors, and the decoding of quantised blocks to float32.

The `gguf` package, which the authors of the format maintain, decodes blocks; nothing else of it is used, because its
reader maps the whole file into memory and trusts the file's numbers (`gguf_header.py`).
"""

import importlib.util
from typing import Any, NamedTuple

import numpy as np

from moe_jax.core.errors import InputError


class Blocks(NamedTuple):
    """A type of quantised blocks. They are read as float32.

    Attributes:
      name: as in the `gguf` package, such as `Q4_K`.
      elements: number of elements in a block, all of one row.
      nbytes: bytes of a block.
    """

    name: str
    elements: int
    nbytes: int


# Types that are stored element by element: number in the file -> name of the dtype in safetensors.
PLAIN = {0: "F32", 1: "F16", 30: "BF16"}

BLOCKS = {
    2: Blocks("Q4_0", 32, 18),
    3: Blocks("Q4_1", 32, 20),
    6: Blocks("Q5_0", 32, 22),
    7: Blocks("Q5_1", 32, 24),
    8: Blocks("Q8_0", 32, 34),
    10: Blocks("Q2_K", 256, 84),
    11: Blocks("Q3_K", 256, 110),
    12: Blocks("Q4_K", 256, 144),
    13: Blocks("Q5_K", 256, 176),
    14: Blocks("Q6_K", 256, 210),
}

# Types that are known by name only.
OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
NAMES = (*PLAIN.values(), *(blocks.name for blocks in BLOCKS.values()))


def require_gguf() -> None:
    """Raises `InputError` unless the package that decodes blocks is installed."""
    if importlib.util.find_spec("gguf") is None:
        raise InputError("quantised tensors of GGUF files need the package gguf: pip install 'moe-jax[gguf]'")


def dequantized(stored: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Decodes blocks.

    Args:
      stored: UInt8[n, blocks.nbytes].
      blocks: their type.

    Returns:
      Float32[n, blocks.elements].
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind: Any = GGMLQuantizationType[blocks.name]
    with np.errstate(all="ignore"):  # scales that are not finite are found where the leaf is used
        return dequantize(stored, kind)
