"""The shared base of a layer's experts as it is stored, and their residuals from that (methods.md 4 and 5).

A base in codes is not the one that was asked for, but residuals are taken from what is stored, so that they make up
for its error as far as their own codes go.

*Refit*: once the residuals have their approximations D_e, the best base is the mean of W_e - D_e. It is encoded in
turn, and then the residuals again. With 8 Gaussian experts, a base of 4 bits and residuals of 2, this gains 13 % of
the squared error, and 18 % if done twice, where the residuals have 0.72 of the variance of the experts. Where they have
0.074 of it, the grid of the base is coarser than what it would be moved by, and the gain is 0.2 %.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from moe_jax.compression.coding.expert_coders import ExpertCoder
from moe_jax.compression.layer_figures import Measure
from moe_jax.compression.source_layer import SourceLayer, Write
from moe_jax.core.errors import InputError
from moe_jax.experts import BankConfig, BaseCodes
from moe_jax.experts.forms import Matrix
from moe_jax.experts.forms.coding import Coder, Residual

REFITS = 2
# What one refit has to gain of the error, for another to be tried.
_LEAST_GAIN = 0.01

Encode = Callable[[int, Residual, ExpertCoder], tuple[Mapping[str, np.ndarray], np.ndarray | Array]]
"""`encode(expert, residual, coder)`: the leaves that store a residual, and the float32 [in, out] they stand for."""


class SharedBase(NamedTuple):
    """The base of one matrix, which all experts share.

    Attributes:
      leaves: as it is stored, by name.
      kernel: [in, out], what they stand for: in the dtype of the experts, or of codes float32.
    """

    leaves: Mapping[str, np.ndarray]
    kernel: np.ndarray


class Coded(NamedTuple):
    """One matrix of all experts, coded.

    Attributes:
      base: None: there is none.
      leaves: of the residuals, stacked over the experts, by name.
      measure: what that did to the matrix.
    """

    base: SharedBase | None
    leaves: dict[str, np.ndarray]
    measure: Measure

    def write(self, name: str, write: Write) -> None:
        """Writes all leaves of the matrix `name`."""
        if self.base is not None:
            write_base(name, self.base, write)
        for leaf, array in self.leaves.items():
            write(f"experts/delta/{name}/{leaf}", array)


def codes_of_options(
    bits: Any, group_size: int | None, *, table: bool = False, scale_bits: int = 16
) -> BaseCodes | None:
    """The codes that the options `centre_bits` and `centre_group_size` of a method ask for; None: none.

    Args:
      bits, group_size: these options.
      table: codes that may have a table of levels have one.
      scale_bits: of their scales; NF4 has its own.

    Raises:
      InputError: if they are out of range, or the second stands alone.
    """
    if bits is not None:
        codes = BaseCodes(code=str(bits), group_size=group_size)  # type: ignore[arg-type]
        if codes.group_size is None:
            return codes
        return dataclasses.replace(codes, table=table and codes.may_have_table, scale_bits=scale_bits)
    if group_size is not None:
        raise InputError(f"centre_group_size={group_size} goes with centre_bits: the centre has no codes without them")
    return None


def stored_base(layer: SourceLayer, bank: BankConfig, name: str, base: np.ndarray, coder: Coder) -> SharedBase:
    """A base as a bank stores it.

    Args:
      layer: of the experts.
      bank: what they become.
      name: of the matrix.
      base: [in, out].
      coder: how codes are chosen.

    Raises:
      InputError: if a number is too large for the dtype of the experts.
    """
    if bank.base_codes is None:
        kernel = layer.stored(name, base)
        return SharedBase({"kernel": kernel}, kernel)
    return SharedBase(*bank.base_codes.form.stored(base, layer.matrices[name], coder))


def write_base(name: str, base: SharedBase, write: Write) -> None:
    """Writes the leaves of the base of the matrix `name`."""
    for leaf, array in base.leaves.items():
        write(f"experts/base/{name}/{leaf}", array)


def base_bytes(codes: BaseCodes | None, matrix: Matrix, itemsize: int) -> int:
    """Bytes of the base of a matrix, in codes, or of so many bytes a number."""
    if codes is None:
        return matrix.size * itemsize
    return codes.form.of_matrix(matrix).bytes(matrix, (), jnp.dtype(jnp.float32))


def code_residuals(
    kernels: Callable[[], Iterable[np.ndarray]],
    base: np.ndarray | None,
    store: Callable[[np.ndarray], SharedBase],
    coders: Callable[[], Iterable[ExpertCoder]],
    encode: Encode,
    measure: Callable[[], Measure],
    *,
    num_experts: int,
    dtype: np.dtype,
    refits: int = 0,
) -> Coded:
    """Codes one matrix of all experts around a base, refitted as long as that helps.

    Args:
      kernels: gives the kernels of all experts, as often as it is called; any floating-point dtype.
      base: [in, out]; None: there is none, and kernels are coded themselves.
      store: how it is stored.
      coders: gives those of all experts, likewise.
      encode: codes a residual.
      measure: an empty measure.
      num_experts: E.
      dtype: of floating-point leaves of the residuals.
      refits: at most so many.

    Returns:
      Of all rounds the one with the least squared error.
    """
    best: Coded | None = None
    for refit in range(refits + 1):
        stored, stacked, figures = None if base is None else store(base), {}, measure()
        wide = np.zeros((), np.float32) if stored is None else stored.kernel.astype(np.float32, copy=False)
        total = np.float32(0)
        for expert, (kernel, coder) in enumerate(zip(kernels(), coders(), strict=True)):
            residual = Residual(kernel.astype(np.float32, copy=False) - wide, dtype, None if stored is None else wide)
            leaves, approximation = encode(expert, residual, coder)
            stack(stacked, leaves, expert, num_experts)
            figures.add(expert, kernel, None if stored is None else stored.kernel, approximation, coder.moment)
            if refit < refits:
                total = total + (kernel.astype(np.float32, copy=False) - np.asarray(approximation))
        found = Coded(stored, stacked, figures)
        before = np.inf if best is None else best.measure.squared_error
        if figures.squared_error < before or best is None:
            best = found
        if figures.squared_error > before * (1 - _LEAST_GAIN):
            break
        base = np.asarray(total / np.float32(num_experts))
    assert best is not None
    return best


def stack(stacked: dict[str, np.ndarray], leaves: Mapping[str, np.ndarray], expert: int, experts: int) -> None:
    """Puts the leaves of one expert where those of all of them are."""
    for name, leaf in leaves.items():
        if name not in stacked:
            stacked[name] = np.empty((experts, *leaf.shape), leaf.dtype)
        stacked[name][expert] = leaf
