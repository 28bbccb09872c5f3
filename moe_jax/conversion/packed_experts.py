"""Experts in codes as compressed-tensors stores them, which Transformers and vLLM load (format `pack-quantized`).

A matrix [out, in] of an expert becomes three tensors: `weight_packed` int32, the codes of a row one after another from
the lowest bits on; `weight_scale` [out, in / group_size]; and `weight_shape`. Entry = (code - 2^(bits-1)) * scale.

These are our packed codes (`packing`) of groups on the even grid, with their bytes transposed, and with scales of twice
our half steps. The scale keeps its sign: it says on which side of zero there is one level more.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from moe_jax.conversion.safetensors_file import PlannedTensor
from moe_jax.conversion.table import Mapped, Piece
from moe_jax.conversion.tensors import DTYPE_NAMES
from moe_jax.core.errors import InputError
from moe_jax.experts.forms.coding import Storable
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig, MoEConfig

BITS = (4, 8)
GROUP_SIZES = (128, 64, 32)
"""Inputs to a scale that vLLM has kernels for; the first that fits is taken."""

_SUFFIX = ".weight"


class Codes(NamedTuple):
    """A kernel [i, o] on the even grid: codes [i * bits / 8, o], and scales [i / group_size, o], never above 0."""

    packed: np.ndarray
    scales: np.ndarray


Quantise = Callable[[np.ndarray, int, int], Codes]
"""`quantise(kernel, bits, group_size)`: returns the codes of a kernel float32[i, o]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """How the experts of a model are written in codes."""

    bits: int  # of a code
    group_size: int  # number of inputs that share a scale
    quantise: Quantise  # makes codes of kernels that have none

    @classmethod
    def of(
        cls, config: ModelConfig, written: ModelConfig, *, quantise: Quantise, bits: int | None, group_size: int | None
    ) -> "Packing":
        """Returns the packing asked for, else that of the experts' codes if all are alike and fit, else 4 bits.

        If no size of groups is asked for, they are of the first of `GROUP_SIZES` that fits, or else the largest.

        Experts may be wider in the config `written` than they are in `config`, and dense layers may be MoEs there.

        Raises:
          InputError: if there is no such format, or it does not fit the experts.
        """
        if not written.moe_layers:
            raise InputError("the model is dense: it has no experts to be written in codes")
        stored = {stored_codes(config.moe(i)) for i in config.moe_layers}
        known = (stored.pop() if len(stored) == 1 else None) or (BITS[0], GROUP_SIZES[0])
        bits = known[0] if bits is None else bits
        if bits not in BITS:
            raise InputError(f"bits={bits} must be 4 or 8: W4A16 and W8A16 are what other libraries have kernels for")
        inputs = {
            (i, name): rows
            for i in written.moe_layers
            for name, (rows, _) in written.moe(i).expert.shapes(written.d_model).items()
        }
        common = math.gcd(*inputs.values())
        tried = (known[1], *GROUP_SIZES, *range(248, 0, -8)) if group_size is None else (group_size,)
        group_size = next((size for size in tried if _is_group(size, common)), tried[0])
        for (i, name), rows in inputs.items():
            if not _is_group(group_size, rows):
                fitting = next((size for size in (*GROUP_SIZES, *range(248, 0, -8)) if _is_group(size, common)), None)
                raise InputError(
                    f"--group-size {group_size} must be a multiple of 8 that divides the {rows} inputs of {name} "
                    f"in layer {i}: compressed-tensors has whole groups; "
                    + (f"try {fitting}" if fitting else "no size divides those of all matrices")
                )
        return cls(bits=bits, group_size=group_size, quantise=quantise)

    def said(self, config: ModelConfig, written: ModelConfig) -> str:
        """Returns a line about the codes: whether the experts of `config` keep theirs, or get new ones."""
        kept = [stored_codes(config.moe(i)) == (self.bits, self.group_size) for i in config.moe_layers]
        same = all(config.moe(i).expert.dim == written.moe(i).expert.dim for i in config.moe_layers)
        had = {codes for i in config.moe_layers if (codes := stored_codes(config.moe(i))) is not None}
        before = " and ".join(f"{bits} bits, {size} inputs to a scale" for bits, size in sorted(had))
        new = f"rounded again, from {before}, which loses a little" if had else "rounded"
        return f"experts are in {self.bits} bits, {self.group_size} inputs to a scale: " + (
            "the codes that they have" if same and kept and all(kept) else new
        )

    def is_packed(self, path: str) -> bool:
        """Whether a leaf is written in codes."""
        return "/mlp/experts/" in path and path.endswith("/kernel")

    def planned(
        self, mapped: Mapped, tensors: Mapping[str, PlannedTensor], dtypes: Mapping[str, np.dtype]
    ) -> dict[str, PlannedTensor]:
        """Returns the tensors to write, in their order, with those in codes in place of their kernels.

        The `tensors` are those of `mapped`, the model without codes, and the `dtypes` those of its leaves.

        Raises:
          InputError: if experts are fused, or their tensors are no weights.
        """
        packed = {
            piece.tensor: piece for path, pieces in mapped.pieces.items() if self.is_packed(path) for piece in pieces
        }
        planned: dict[str, PlannedTensor] = {}
        for name, tensor in tensors.items():
            piece = packed.get(name)
            if piece is None:
                planned[name] = tensor
                continue
            if len(tensor.shape) != 2 or not name.endswith(_SUFFIX) or not piece.transpose or piece.offset:
                raise InputError(f"{name} cannot be in codes: experts need a matrix each, so that of another family")
            (rows, columns), scale = tensor.shape, DTYPE_NAMES[np.dtype(dtypes[piece.leaf])]
            planned |= {
                f"{name}_packed": PlannedTensor("I32", (rows, math.ceil(columns * self.bits / 32))),
                f"{name}_scale": PlannedTensor(scale, (rows, columns // self.group_size)),
                f"{name}_shape": PlannedTensor("I64", (2,)),
            }
        return planned

    def tensors(self, piece: Piece, codes: Codes, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the tensors of one kernel, with their names; `dtype` is that of the scales."""
        packed = np.pad(codes.packed, ((0, -len(codes.packed) % 4), (0, 0)))
        yield f"{piece.tensor}_packed", np.ascontiguousarray(packed.T).view("<i4")
        scales = 2 * codes.scales.astype(np.float32)
        yield f"{piece.tensor}_scale", np.ascontiguousarray(scales.T).astype(dtype)
        yield f"{piece.tensor}_shape", np.asarray(piece.shape, np.int64)

    def describe(self, mapped: Mapped) -> dict[str, Any]:
        """Returns the `quantization_config` of config.json."""
        packed = (piece for path, pieces in mapped.pieces.items() if self.is_packed(path) for piece in pieces)
        ends = sorted({piece.template.removesuffix(_SUFFIX).rpartition(".")[2] for piece in packed})
        group = {
            "targets": [rf"re:.*\.experts\.\d+\.({'|'.join(ends)})$"],
            "weights": {
                "num_bits": self.bits,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": self.group_size,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        }


def _is_group(size: int, rows: int) -> bool:
    return size >= 8 and size % 8 == 0 and rows % size == 0


def stored_codes(moe: MoEConfig) -> tuple[int, int] | None:
    """Returns bits and group size of experts that are plain codes in groups; None for others."""
    codes = moe.bank.form.codes_in_groups if isinstance(moe.bank.form, Storable) else None
    return None if moe.bank.has_base or codes is None or codes[0] not in BITS else codes


def codes_of(source: ModelSource, path: str, shape: tuple[int, int], packing: Packing) -> Iterator[Codes] | None:
    """Returns the stored codes of all experts, if they can be written as they are; None: they cannot.

    A kernel that is written has the `shape` [in, out]: with narrower experts it has more neurons, and needs new codes.

    Raises:
      InputError: if groups are on the odd grid, which compressed-tensors does not have.
    """
    block, _, name = path.removesuffix("/kernel").partition("/experts/")
    mlp = source.config.layers[int(path.split("/")[1])].mlp
    if not isinstance(mlp, MoEConfig) or stored_codes(mlp) != (packing.bits, packing.group_size):
        return None
    if mlp.expert.shapes(source.config.d_model)[name] != shape:
        return None
    folder = f"{block}/experts/delta/{name}"
    codes, scales = source.read(f"{folder}/codes"), source.read(f"{folder}/scales")
    if (scales.astype(np.float32) > 0).any():
        raise InputError(
            f"{folder}: its codes stand for odd multiples of half a step, which compressed-tensors has not; compress "
            "with --levels even, or give the model as it was before"
        )
    return map(Codes, codes, scales)
