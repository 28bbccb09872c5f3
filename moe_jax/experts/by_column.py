"""Arranges the sparse deltas of a model by column, with which a CPU generates (`SparseByColumn`)."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.core.data_sheets import available_memory
from moe_jax.experts.bank import KernelBank
from moe_jax.experts.bank_config import BankConfig
from moe_jax.experts.devices import current_chip, current_mesh
from moe_jax.experts.forms.sparse import POSITION_LEAVES, Sparse, decode_positions
from moe_jax.experts.forms.sparse_by_column import SparseByColumn
from moe_jax.experts.linear import Leaves
from moe_jax.experts.shapes import Matrix
from moe_jax.functional.sparse.by_column import UNIT, Columns, empty_columns, lay_out_by_column

_MOST_OF_MEMORY = 1 / 2
"""Share of the free memory that entries by column may take: about twice as much as they take as they are stored."""

_M = TypeVar("_M", bound=nnx.Module)


def by_column(model: _M) -> _M:
    """Returns a model whose sparse deltas are arranged for products on a CPU; the model itself if it has none.

    All other arrays are those of the model, which stays as it is. Nothing is arranged on other devices or over a mesh;
    nor a layer's experts if their entries would take more room than whole kernels, or more memory than half of what is
    free.
    """
    if not any(_sparse_banks(model)):
        return model
    copy = nnx.merge(*nnx.split(model))
    arrange_by_column(copy)
    return copy


def arrange_by_column(model: nnx.Module) -> None:
    """Does in place what `by_column` does with a copy."""
    free = available_memory()
    room = math.inf if free is None else free * _MOST_OF_MEMORY
    for bank in list(_sparse_banks(model)):
        matrices = {name: _Entries.of(bank, matrix) for name, matrix in bank.matrices.items()}
        size, whole = (sum(sizes) for sizes in zip(*(entries.sizes for entries in matrices.values()), strict=True))
        if size <= min(whole, room):
            room -= size
            _replace(bank, matrices)


def _sparse_banks(model: nnx.Module) -> Iterator[KernelBank]:
    if current_chip().platform != "cpu" or current_mesh() is not None:
        return
    for _, module in nnx.iter_modules(model):
        if isinstance(module, KernelBank) and isinstance(module.config.form, Sparse):
            leaf = jax.tree.leaves(nnx.state(module.delta))[0]
            if isinstance(leaf, Array) and len(leaf.devices()) == 1:
                yield module


def _replace(bank: KernelBank, matrices: "dict[str, _Entries]") -> None:
    """Gives a bank these entries, by column."""
    leaves = {}
    for name, entries in matrices.items():
        leaves |= {f"{name}/{leaf}": jnp.asarray(array) for leaf, array in entries.by_column()._asdict().items()}
    form = SparseByColumn(places=tuple(entries.places for entries in matrices.values()))
    of_base = {name: getattr(bank.config, name) for name in ("base", "train_base", "base_codes")}
    bank.config, bank.delta = BankConfig(form, **of_base), Leaves(leaves, form.is_trained)


class _Entries(NamedTuple):
    """The entries of a matrix of all experts, on the host.

    Attributes:
      stack: axes in front, such as those of layers and experts.
      shape: [in, out] of the matrix.
      positions: columns and row ends of the entries of every kernel.
      values: of the entries [kernel, n].
      places: that every column is given.
    """

    stack: tuple[int, ...]
    shape: tuple[int, int]
    positions: list[tuple[Int[np.ndarray, " n"], Int[np.ndarray, " i"]]]
    values: Float[np.ndarray, "K n"]
    places: int

    @classmethod
    def of(cls, bank: KernelBank, matrix: Matrix) -> "_Entries":
        form, folder = bank.config.form, f"{matrix.name}/"
        assert isinstance(form, Sparse)
        own = {
            path.removeprefix(folder): array for path, array in bank.delta.arrays().items() if path.startswith(folder)
        }
        names = POSITION_LEAVES[form.encoding]
        trailing = 2 if form.encoding == "bitmap" else 1
        stack = own[names[0]].shape[:-trailing]
        flat = {name: array.reshape(-1, *array.shape[len(stack) :]) for name, array in own.items()}
        values = flat["values"] if form.bits is None else jax.jit(jax.vmap(form.values))(flat)
        leaves = {name: np.asarray(flat[name]) for name in names}

        def positions(kernel: int) -> tuple[np.ndarray, np.ndarray]:
            return decode_positions({name: leaf[kernel] for name, leaf in leaves.items()}, matrix.shape)

        with ThreadPoolExecutor() as pool:
            found = list(pool.map(positions, range(math.prod(stack))))
        fullest = max(int(np.bincount(columns).max(initial=0)) for columns, _ in found)
        return cls(stack, matrix.shape, found, np.asarray(values), max(UNIT, -(-fullest // UNIT) * UNIT))

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the entries by column, and of whole kernels."""
        one = empty_columns((1, 1, 1), self.shape[0], self.values.dtype)
        place, kernels = sum(array.nbytes for array in one), math.prod(self.stack)
        return kernels * self.places * self.shape[1] * place, kernels * math.prod(self.shape) * one.values.itemsize

    def by_column(self) -> Columns:
        kernels, of_kernel = math.prod(self.stack), (self.places, self.shape[1])
        out = empty_columns((kernels, *of_kernel), self.shape[0], self.values.dtype)

        def lay_out(kernel: int) -> None:
            columns, row_ends = self.positions[kernel]
            lay_out_by_column(columns, row_ends, self.values[kernel, : len(columns)], out, kernel)

        with ThreadPoolExecutor() as pool:
            list(pool.map(lay_out, range(kernels)))
        return Columns(*(array.reshape(*self.stack, *of_kernel) for array in out))
