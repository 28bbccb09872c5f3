"""A quantised checkpoint whose experts stay in the codes that it has: they are moved, and never made whole.

Experts can stay if the form `quantized` can say what their codes stand for: whole numbers less a zero point, or levels
of a table, times a scale that consecutive inputs of an output share. Every number is then what the decoded checkpoint
has, to the last bit. What is not an expert is decoded.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory
from moe_jax.conversion.table import Piece
from moe_jax.conversion.tensors import CodesOfGroups, Groups
from moe_jax.core.code_options import BITS, TABLE_BITS
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import show_bytes
from moe_jax.experts.forms.quantized import Quantized
from moe_jax.functional.codes import SCALE_DTYPE
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import BankConfig, ModelConfig, MoEConfig


class _Kept(NamedTuple):
    """A leaf of codes in place of whole kernels: its part (`codes`, `scales`, ...), and the leaf of these kernels."""

    part: str
    kernel: str


def _is_exact(levels: tuple[float, ...]) -> bool:
    exact = np.asarray(levels, np.float32)
    return bool((exact.astype(SCALE_DTYPE).astype(np.float32) == exact).all())


class KeptCodes:
    """A quantised checkpoint, read leaf by leaf; its experts in their codes, where they can stay. A `ModelSource`.

    Attributes:
      config: of the model, with the form of these experts.
      reasons: by layer, why its experts were decoded.
    """

    base = None

    def __init__(self, source: HuggingFaceDirectory):
        """Takes an opened checkpoint.

        Raises:
          InputError: if the experts of no layer can stay in codes.
        """
        self.source = source
        self.path, self.fingerprint = source.path, source.fingerprint
        self.reasons: dict[int, str] = {}
        layers, self._kept = list(source.config.layers), dict[str, _Kept]()
        for i in source.config.moe_layers:
            moe = source.config.moe(i)
            folder = f"layers/{i}/mlp/experts"
            kernels = {name: f"{folder}/{name}/kernel" for name in moe.expert.shapes(source.config.d_model)}
            form = self._form_of(kernels)
            if isinstance(form, str):
                self.reasons[i] = form
                continue
            layers[i] = dataclasses.replace(layers[i], mlp=with_form(moe, form))
            parts = ("codes", "scales", "table" if form.table else "zeros")
            self._kept |= {
                f"{folder}/delta/{name}/{part}": _Kept(part, kernel)
                for name, kernel in kernels.items()
                for part in parts
            }
        if not self._kept:
            why = next(iter(self.reasons.values()), "the model has no experts")
            raise InputError(f"{source.path}: no experts can stay in codes: {why}; convert without --codes keep")
        self.config: ModelConfig = dataclasses.replace(source.config, layers=tuple(layers))

    @property
    def tokenizer_files(self) -> Any:
        """The files that are copied with the model."""
        return self.source.tokenizer_files

    @property
    def lineage(self) -> Any:
        """How the checkpoint was made, one entry per command."""
        return self.source.lineage

    def _form_of(self, kernels: Mapping[str, str]) -> Quantized | str:
        """Returns the form of experts in the codes of these kernels, by matrix; or why there is none."""
        found: dict[str, Groups] = {}
        for name, kernel in kernels.items():
            for piece in self.source.weights.pieces[kernel]:
                coded = self.source.weights.tensors[piece.tensor].coded
                groups = None if coded is None else coded.codes.groups
                if coded is None:
                    return f"{piece.tensor} is not in codes"
                if groups is None or not piece.transpose:
                    return f"{piece.tensor} is in {coded.kind}, whose codes do not lie in groups of consecutive inputs"
                if groups.bits not in (BITS if groups.levels is None else TABLE_BITS):
                    return f"{piece.tensor} has codes of {groups.bits} bits, which experts here do not have"
                if groups.levels is not None and not _is_exact(groups.levels):
                    return f"{piece.tensor} has levels that a table here, of bfloat16, does not have"
                if found.setdefault(name, groups) != groups:
                    return f"{piece.tensor} has other codes than the other experts"
        one = next(iter(found.values()))
        whole_rows = all(groups.size >= self._inputs(kernels[name]) for name, groups in found.items())
        if whole_rows:
            size = 8 * math.ceil(max(self._inputs(kernel) for kernel in kernels.values()) / 8)
        else:
            size = one.size
        if any(groups.levels != one.levels for groups in found.values()) or not (
            whole_rows or all(groups.size == one.size for groups in found.values())
        ):
            return f"the matrices of an expert have codes of several kinds, such as {kernels[min(kernels)]}"
        if size % 8:
            return f"{size} consecutive inputs share a scale, and groups here have multiples of 8"
        own: dict[str, Any] = {f"{name}_bits": groups.bits for name, groups in found.items() if groups.bits != one.bits}
        options: dict[str, Any] = {"table": True} if one.levels is not None else {"zero_points": True}
        return Quantized(bits=one.bits, group_size=size, scale_bits=32, **options, **own)

    def _inputs(self, kernel: str) -> int:
        return self.source.weights.pieces[kernel][0].shape[1]

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every leaf, by path."""
        whole, described = self.source.specs(), leaf_specs(self.config)
        return {path: described[path] if path in self._kept else whole[path] for path in described}

    def describe(self) -> list[str]:
        """Returns lines about what stays in codes, and what does not."""
        forms = Counter(self.config.moe(i).bank.describe() for i in self.config.moe_layers if i not in self.reasons)
        size = show_bytes(sum(map(self.stored_bytes, self._kept)))
        said = [f"experts of {count} layers stay in codes, {form}" for form, count in forms.items()]
        said[-1] += f": {size}"
        if self.reasons:
            i, why = next(iter(self.reasons.items()))
            said.append(f"note: experts of {len(self.reasons)} layers are decoded, such as those of layer {i}: {why}")
        return said

    def is_kept(self, path: str) -> bool:
        """Whether a leaf is a part of experts that stay in codes."""
        return path in self._kept

    def stored_bytes(self, path: str) -> int:
        """Returns the number of bytes of one leaf: on disk, or as codes here."""
        if not self.is_kept(path):
            return self.source.stored_bytes(path)
        spec = self.specs()[path]
        return spec.size * spec.dtype.itemsize

    def read(self, path: str, dtype: np.dtype | None = None, buffer: np.ndarray | None = None) -> np.ndarray:
        """Reads one leaf as `HuggingFaceDirectory` does; a part of codes in its own dtype, expert by expert.

        Raises:
          InputError: if a zero point lies outside the codes, or as `HuggingFaceDirectory.read` does.
        """
        if not self.is_kept(path):
            return self.source.read(path, dtype, buffer)
        kept, spec = self._kept[path], self.specs()[path]
        out = np.empty(spec.shape, spec.dtype)
        for piece in self.source.weights.pieces[kept.kernel]:
            assert piece.expert is not None
            out[piece.expert] = self._part(piece, kept.part)
        return out

    def _part(self, piece: Piece, part: str) -> np.ndarray:
        """Returns a part of the codes of one expert's kernel [in, out]."""
        entry = self.source.weights.tensors[piece.tensor]
        assert entry.coded is not None and entry.coded.codes.groups is not None
        bits, _, levels = entry.coded.codes.groups
        if part == "table":
            assert levels is not None
            return np.sort(np.asarray(levels, np.float32))
        found = self.source.codes(piece)
        return _PARTS[part](found, bits, levels, piece.tensor)


def with_form(moe: MoEConfig, form: Quantized) -> MoEConfig:
    """Returns the config of a layer whose experts are in codes of a form, and nothing beside them."""
    return dataclasses.replace(moe, bank=BankConfig(form, base="none"))


def _codes(found: CodesOfGroups, bits: int, levels: tuple[float, ...] | None, where: str) -> np.ndarray:
    codes = found.codes
    if (
        levels is not None
    ):  # tables are in ascending order; equal levels, such as 0 and -0, are one as good as the other
        order = np.argsort(np.argsort(np.asarray(levels), kind="stable")).astype(np.uint8)
        codes = order[codes]
    return packed(np.ascontiguousarray(codes.T), bits)


def _scales(found: CodesOfGroups, bits: int, levels: tuple[float, ...] | None, where: str) -> np.ndarray:
    # Without a table, a scale is half a step.
    return found.scales.T * np.float32(1 if levels is not None else 0.5)


def _zeros(found: CodesOfGroups, bits: int, levels: tuple[float, ...] | None, where: str) -> np.ndarray:
    zeros = np.full(found.scales.shape, 1 << (bits - 1)) if found.zeros is None else found.zeros
    if zeros.min() < 0 or zeros.max() >= 1 << bits:
        raise InputError(f"{where} has a zero point outside its codes; convert without --codes keep")
    return (zeros.T << (8 - bits)).astype(np.uint8)


_PARTS: Mapping[str, Callable[[CodesOfGroups, int, tuple[float, ...] | None, str], np.ndarray]] = {
    "codes": _codes,
    "scales": _scales,
    "zeros": _zeros,
}


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes UInt8[i, o] along their first axis, as `functional.codes.pack` does."""
    rows, columns = codes.shape
    per_word, word_bytes = (8, 3) if bits == 3 else (8 // bits, 1)
    codes = np.pad(codes, ((0, -rows % per_word), (0, 0))).reshape(-1, per_word, columns)
    words = np.zeros((len(codes), columns), np.uint32)
    for place in range(per_word):
        words |= codes[:, place].astype(np.uint32) << np.uint32(place * bits)
    out = np.stack([(words >> np.uint32(8 * byte)).astype(np.uint8) for byte in range(word_bytes)], axis=1)
    return out.reshape(-1, columns)[: math.ceil(rows * bits / 8)]
