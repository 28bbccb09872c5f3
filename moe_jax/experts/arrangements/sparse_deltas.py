"""Lays out the sparse deltas of a model by column, with which a CPU generates (`SparseByColumn`)."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.core.data_sheets import available_memory
from moe_jax.experts.bank import KernelBank
from moe_jax.experts.forms.sparse import POSITION_LEAVES, Sparse, decode_positions, index_dtype
from moe_jax.experts.forms.sparse_by_column import SparseByColumn
from moe_jax.experts.linear import Leaves
from moe_jax.experts.shapes import Matrix
from moe_jax.functional.sparse.by_column import UNIT, Columns, kept_dtype, lay_out_by_column

_MOST_OF_MEMORY = 1 / 2
"""Share of the free memory that entries by column may take: about twice as much as they take as they are stored."""


def arrange_by_column(model: nnx.Module) -> None:
    """Changes in place the experts of a model that are sparse deltas.

    Those of a layer stay as they are if their entries would take more room than whole kernels, or more memory than half
    of what is free, or if there are only shapes of them.
    """
    free = available_memory()
    room = math.inf if free is None else free * _MOST_OF_MEMORY
    for bank in list(_sparse_banks(model)):
        matrices = {name: _Stored.of(bank, matrix) for name, matrix in bank.matrices.items()}
        most = min(room, sum(stored.whole_bytes for stored in matrices.values()))
        if sum(map(_Stored.least_bytes, matrices.values())) > most:
            continue  # without a look at where entries are
        entries = {name: stored.entries() for name, stored in matrices.items()}
        size = sum(own.size for own in entries.values())
        if size <= most:
            room -= size
            _replace(bank, entries)


def _sparse_banks(model: nnx.Module) -> Iterator[KernelBank]:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, KernelBank) and isinstance(module.config.form, Sparse):
            if isinstance(jax.tree.leaves(nnx.state(module.delta))[0], Array):
                yield module


def _replace(bank: KernelBank, matrices: "dict[str, _Entries]") -> None:
    """Gives a bank these entries, by column."""
    leaves = {}
    for name, entries in matrices.items():
        leaves |= {f"{name}/{leaf}": jnp.asarray(array) for leaf, array in entries.by_column()._asdict().items()}
    form = SparseByColumn(places=tuple(entries.places for entries in matrices.values()))
    bank.config, bank.delta = bank.config.of_same_base(form), Leaves(leaves, form.is_trained)


class _Stored(NamedTuple):
    """A matrix of all experts as `Sparse` stores it.

    Attributes:
      form: of the experts.
      matrix: which it is.
      stack: axes in front, such as those of layers and experts.
      leaves: [kernel, ...], by name.
    """

    form: Sparse
    matrix: Matrix
    stack: tuple[int, ...]
    leaves: dict[str, Array]

    @classmethod
    def of(cls, bank: KernelBank, matrix: Matrix) -> "_Stored":
        form, arrays = bank.config.form, bank.arrays_of(matrix.name)
        assert isinstance(form, Sparse)
        own = 2 if form.encoding == "bitmap" else 1  # axes of a kernel's first leaf
        stack = arrays[POSITION_LEAVES[form.encoding][0]].shape[:-own]
        flat = {name: array.reshape(-1, *array.shape[len(stack) :]) for name, array in arrays.items()}
        return cls(form, matrix, stack, flat)

    @property
    def dtypes(self) -> tuple[np.dtype, np.dtype]:
        """The dtypes of rows and values by column."""
        values = self.leaves["values"].dtype if self.form.bits is None else np.dtype(np.float32)
        return index_dtype(self.matrix.shape[0]), kept_dtype(values)

    def bytes_of(self, places: float) -> float:
        """Bytes that all kernels take by column with so many places in a column."""
        return math.prod(self.stack) * places * self.matrix.shape[1] * sum(dtype.itemsize for dtype in self.dtypes)

    def least_bytes(self) -> float:
        """Returns the bytes that they would take by column if all columns had as many entries."""
        return self.bytes_of(self.form.kept_entries(self.matrix) / self.matrix.shape[1])

    @property
    def whole_bytes(self) -> int:
        """Bytes of whole kernels."""
        return math.prod(self.stack) * self.matrix.size * self.dtypes[1].itemsize

    def entries(self) -> "_Entries":
        values = self.leaves["values"] if self.form.bits is None else jax.jit(jax.vmap(self.form.values))(self.leaves)
        leaves = {name: np.asarray(self.leaves[name]) for name in POSITION_LEAVES[self.form.encoding]}

        def positions(kernel: int) -> tuple[np.ndarray, np.ndarray]:
            return decode_positions({name: leaf[kernel] for name, leaf in leaves.items()}, self.matrix.shape)

        with ThreadPoolExecutor() as pool:
            found = list(pool.map(positions, range(math.prod(self.stack))))
        fullest = max(int(np.bincount(columns).max(initial=0)) for columns, _ in found)
        return _Entries(self, found, np.asarray(values), max(UNIT, -(-fullest // UNIT) * UNIT))


class _Entries(NamedTuple):
    """The entries of a matrix of all experts, on the host.

    Attributes:
      stored: where they come from.
      positions: columns and row ends of the entries of every kernel.
      values: of the entries [kernel, n].
      places: that every column is given.
    """

    stored: _Stored
    positions: list[tuple[Int[np.ndarray, " n"], Int[np.ndarray, " i"]]]
    values: Float[np.ndarray, "K n"]
    places: int

    @property
    def size(self) -> float:
        """Bytes by column."""
        return self.stored.bytes_of(self.places)

    def by_column(self) -> Columns:
        of_kernel = self.places, self.stored.matrix.shape[1]
        out = Columns(*(np.zeros((len(self.positions), *of_kernel), dtype) for dtype in self.stored.dtypes))  # type: ignore

        def lay_out(kernel: int) -> None:
            columns, row_ends = self.positions[kernel]
            lay_out_by_column(columns, row_ends, self.values[kernel, : len(columns)], out, kernel)

        with ThreadPoolExecutor() as pool:
            list(pool.map(lay_out, range(len(self.positions))))
        return Columns(*(array.reshape(*self.stored.stack, *of_kernel) for array in out))
