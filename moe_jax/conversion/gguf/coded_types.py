"""The types of experts that are in codes: K-quants of as many bits as the codes have, matrix by matrix.

Codes may stand for what experts add to a shared base. A GGUF file holds the sum: it is larger than what was added, by
2^k, and takes k bits more for the same error; at most as many as the codes of the base have, whose error was added,
too.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moe_jax.conversion.gguf.gguf_types import Planned
from moe_jax.conversion.spec import AS_CODED
from moe_jax.conversion.table import Piece
from moe_jax.core.errors import InputError
from moe_jax.experts import BankConfig
from moe_jax.experts.forms import KernelForm, Matrix, ffn_matrices
from moe_jax.experts.forms.coding import own_of
from moe_jax.experts.on_host import base_kernel, expert_kernels
from moe_jax.model_io.model_source import ModelSource

_TYPES = {1: "Q2_K", 2: "Q2_K", 3: "Q3_K", 4: "Q4_K", 5: "Q5_K", 6: "Q6_K", 7: "Q8_0", 8: "Q8_0"}
_MOST = max(_TYPES)
# The mix of which most matrices have a type.
_MIXES = {"Q2_K": "Q2_K", "Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "Q6_K": "Q6_K", "Q8_0": "Q8_0"}


class _Codes(NamedTuple):
    """The codes of a matrix of all experts of a layer."""

    bits: int  # of experts in two parts, the more
    on_base: bool
    needed: int  # bits of what takes their place


class CodedTypes(NamedTuple):
    """The types that take the place of codes.

    Attributes:
      codes: of experts, by the name of the tensor that they become.
      mix: for all other tensors: that of the type which most of these weights get.
    """

    codes: Mapping[str, _Codes]
    mix: str

    def type_of(self, name: str) -> str | None:
        """Returns the type of a tensor; None: it holds no experts in codes."""
        return _TYPES[self.codes[name].needed] if name in self.codes else None

    def said(self, tensors: Mapping[str, Planned]) -> str:
        """Returns a line about what becomes of codes, and how large they and the whole become."""
        counts = Counter((own.bits, own.on_base, tensors[name].kind) for name, own in self.codes.items())
        changes = ", ".join(
            f"{bits}-bit{' on a base' * on_base} to {kind} (x{count})"
            for (bits, on_base, kind), count in sorted(counts.items())
        )
        experts, every = _bits_per_weight([tensors[name] for name in self.codes]), _bits_per_weight([*tensors.values()])
        return (
            f"codes of experts are rounded again, which loses a little: {changes}; {experts:.2f} bits per weight. The "
            f"rest is as in {self.mix}: of the whole model, {every:.2f}"
        )


def coded_types(source: ModelSource, pieces: Mapping[str, Sequence[Piece]]) -> CodedTypes:
    """Finds the types for a model whose experts are in codes; those on a shared base are read for that.

    Args:
      source: the model.
      pieces: of the leaves of its whole experts in the file.

    Raises:
      InputError: if no experts are in codes.
    """
    found: dict[str, _Codes] = {}
    weights: Counter[str] = Counter()
    for layer in source.config.moe_layers:
        moe, bank = source.config.moe(layer), f"layers/{layer}/mlp/experts"
        for name, matrix in ffn_matrices(moe.expert, source.config.d_model).items():
            bits = _bits_of(moe.bank, matrix, moe.routed_experts)
            if bits is None:
                continue
            on_base = moe.bank.has_base_of(name)
            needed = bits + (_more_bits(source, moe.bank, bank, matrix) if on_base else 0)
            own = _Codes(bits, on_base, min(needed, _MOST))
            found[pieces[f"{bank}/{name}/kernel"][0].tensor] = own
            weights[_TYPES[own.needed]] += moe.routed_experts * math.prod(matrix.shape)
    if not found:
        raise InputError(f"--gguf-type {AS_CODED}: no experts are in codes; choose a type or mix, such as Q4_K_M")
    return CodedTypes(found, _MIXES[weights.most_common(1)[0][0]])


def _bits_of(bank: BankConfig, matrix: Matrix, experts: int) -> int | None:
    """Returns the bits of the codes of a matrix, the most of all experts; None: they are not in codes."""
    if not isinstance(bank.form, KernelForm):
        return None
    forms = [own_of(bank.form, expert).form.of_matrix(matrix) for expert in range(experts)]
    bits = [form.bits_of_codes for form in forms if form.bits_of_codes is not None]
    return max(bits) if bits else None


def _more_bits(source: ModelSource, bank: BankConfig, path: str, matrix: Matrix) -> int:
    """Returns how many bits more than its codes the first expert needs, for its sum with the base."""
    most = _MOST
    if bank.base_codes is not None:
        codes = bank.base_codes.form.of_matrix(matrix).codes
        most = codes.bits_of_codes or 4  # NF4
    base = np.asarray(base_kernel(source.read, bank, path, matrix), np.float32)
    (whole,) = expert_kernels(source.read, bank, path, matrix, dtype=np.dtype(np.float32), experts=[0])
    sizes = [float(np.linalg.norm(values)) for values in (whole, whole - base)]
    if not (all(map(math.isfinite, sizes)) and min(sizes) > 0):
        return most
    return min(max(0, round(math.log2(sizes[0] / sizes[1]))), most)


def _bits_per_weight(tensors: Sequence[Planned]) -> float:
    return 8 * sum(tensor.nbytes for tensor in tensors) / sum(tensor.num_elements for tensor in tensors)
