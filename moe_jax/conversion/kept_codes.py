"""A quantised checkpoint whose experts stay in the codes that it has: they are moved, and never made whole.

Experts can stay if the form `quantized` can say what their codes stand for: whole numbers less a zero point, or levels
of a table, times a scale that consecutive inputs of an output share. Every number is then what the decoded checkpoint
has, to the last bit. What is not an expert is decoded.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np

from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory
from moe_jax.conversion.tensors import CodesOfGroups, GroupedRows, Groups
from moe_jax.core.code_options import BITS, TABLE_BITS
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import show_bytes
from moe_jax.experts.forms.quantized import Quantized
from moe_jax.functional.codes import SCALE_DTYPE, pack
from moe_jax.model_io.loading import leaf_specs
from moe_jax.models import BankConfig, ModelConfig


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
        layers = list(source.config.layers)
        self._parts: dict[str, dict[str, str]] = {}  # of a kernel, the leaves in its place, by what they hold
        self._kernel_of: dict[str, str] = {}
        self._read: tuple[str, dict[str, np.ndarray]] | None = None  # the last kernel, and these leaves
        for i in source.config.moe_layers:
            moe = source.config.moe(i)
            folder = f"layers/{i}/mlp/experts"
            kernels = {name: f"{folder}/{name}/kernel" for name in moe.expert.shapes(source.config.d_model)}
            form = self._form_of(kernels)
            if isinstance(form, str):
                self.reasons[i] = form
                continue
            layers[i] = dataclasses.replace(layers[i], mlp=dataclasses.replace(moe, bank=BankConfig(form, base="none")))
            parts = ("codes", "scales", "table" if form.table else "zeros")
            for name, kernel in kernels.items():
                self._parts[kernel] = {part: f"{folder}/delta/{name}/{part}" for part in parts}
                self._kernel_of |= dict.fromkeys(self._parts[kernel].values(), kernel)
        if not self._parts:
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
                if coded is None:
                    return f"{piece.tensor} is not in codes"
                grouped = coded.codes if isinstance(coded.codes, GroupedRows) else None
                groups = None if grouped is None else grouped.groups
                if grouped is None or groups is None or piece.transpose == grouped.is_transposed:
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
        first = self.source.weights.pieces[kernel][0]
        return first.shape[1 if first.transpose else 0]

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every leaf, by path."""
        return self._specs

    @cached_property
    def _specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        whole, described = self.source.specs(), leaf_specs(self.config)
        return {path: spec if self.is_kept(path) else whole[path] for path, spec in described.items()}

    def describe(self) -> list[str]:
        """Returns lines about what stays in codes, and what does not."""
        forms = Counter(self.config.moe(i).bank.describe() for i in self.config.moe_layers if i not in self.reasons)
        size = show_bytes(sum(map(self.stored_bytes, self._kernel_of)))
        said = [f"experts of {count} layers stay in codes, {form}" for form, count in forms.items()]
        said[-1] += f": {size}"
        if self.reasons:
            i, why = next(iter(self.reasons.items()))
            said.append(f"note: experts of {len(self.reasons)} layers are decoded, such as those of layer {i}: {why}")
        return said

    def is_kept(self, path: str) -> bool:
        """Whether a leaf is a part of experts that stay in codes."""
        return path in self._kernel_of

    def stored_bytes(self, path: str) -> int:
        """Returns the number of bytes of one leaf: on disk, or as codes here."""
        if not self.is_kept(path):
            return self.source.stored_bytes(path)
        spec = self._specs[path]
        return spec.size * spec.dtype.itemsize

    def read(self, path: str, dtype: np.dtype | None = None, buffer: np.ndarray | None = None) -> np.ndarray:
        """Reads one leaf as `HuggingFaceDirectory` does; a part of codes in its own dtype, expert by expert.

        Raises:
          InputError: if a zero point lies outside the codes, or as `HuggingFaceDirectory.read` does.
        """
        if not self.is_kept(path):
            return self.source.read(path, dtype, buffer)
        kernel = self._kernel_of[path]
        if self._read is None or self._read[0] != kernel:
            self._read = None  # those of one kernel are in memory at a time
            self._read = kernel, self._leaves_of(kernel)
        return self._read[1][path]

    def _leaves_of(self, kernel: str) -> dict[str, np.ndarray]:
        """Returns the leaves in the place of a kernel: the codes of every expert are read once for all of them."""
        parts, specs = self._parts[kernel], self._specs
        leaves = {path: np.empty(specs[path].shape, specs[path].dtype) for path in parts.values()}
        for piece in self.source.weights.pieces[kernel]:
            coded = self.source.weights.tensors[piece.tensor].coded
            assert coded is not None and isinstance(coded.codes, GroupedRows) and coded.codes.groups is not None
            made = _parts(self.source.codes(piece), coded.codes.groups, piece.tensor)
            for part, path in parts.items():
                leaves[path][piece.expert] = made[part]
        return leaves


def _parts(found: CodesOfGroups, groups: Groups, where: str) -> dict[str, np.ndarray]:
    """Returns the parts of a kernel [in, out] whose transpose is in these codes."""
    if groups.levels is not None:
        # Tables are in ascending order; of equal levels, such as 0 and -0, either will do.
        levels = np.asarray(groups.levels, np.float32)
        places = np.argsort(np.argsort(levels, kind="stable")).astype(np.uint8)
        codes = _packed(places[found.codes].T, groups.bits)
        return {"codes": codes, "scales": found.scales.T, "table": np.sort(levels)}
    zeros = np.full(found.scales.shape, 1 << (groups.bits - 1)) if found.zeros is None else found.zeros
    if zeros.min() < 0 or zeros.max() >= 1 << groups.bits:
        raise InputError(f"{where} has a zero point outside its codes; convert without --codes keep")
    return {
        "codes": _packed(found.codes.T, groups.bits),
        "scales": found.scales.T * np.float32(0.5),  # without a table, a scale is half a step
        "zeros": (zeros.T << (8 - groups.bits)).astype(np.uint8),
    }


# One program for every shape of kernels.
_packed = jax.jit(pack, static_argnums=1)
