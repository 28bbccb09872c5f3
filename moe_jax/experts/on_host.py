"""Banks on the host, as leaves in files: experts from leaves, and leaves from a dense FFN; no module is built."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe_jax.core.errors import InputError
from moe_jax.experts.bank_config import BankConfig
from moe_jax.experts.forms.coding import ByExpert, CodedJointly, own_of
from moe_jax.experts.forms.kernel_of_codes import Coded
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.shapes import FFNConfig, Matrix, Window, ffn_matrices

Reader = Callable[[str], np.ndarray]
"""Reads one leaf by its path."""


def expert_kernels(
    read: Reader,
    config: BankConfig,
    bank: str,
    matrix: Matrix,
    *,
    dtype: np.dtype | None = None,
    experts: Iterable[int] | None = None,
) -> Iterator[np.ndarray]:
    """Yields a kernel [in, out] of every expert of a bank, to be merged, measured or compressed.

    Memory holds the stored leaves of the matrix and the kernel of one expert.

    Args:
      read: reads a leaf by its path.
      config: of the bank.
      bank: the path of the bank, such as "layers/3/mlp/experts".
      matrix: one of `ffn_matrices`.
      dtype: of the kernels; None: that of the base, or float32 without a base or of one in codes. Whole kernels keep
        the dtype in which they are stored.
      experts: indices of experts; None: all of them.

    Raises:
      InputError: if the experts are not FFNs.
    """
    form, name = config.form, matrix.name
    if not isinstance(form, KernelForm):
        raise InputError(f"{config.kind} experts have no kernels of their own")
    if not form.over_base:
        kernels = read(f"{bank}/{name}/kernel")
        yield from (kernels[expert] for expert in (range(len(kernels)) if experts is None else experts))
        return
    form = form.of_matrix(matrix)
    base = base_kernel(read, config, bank, matrix) if config.has_base_of(name) else None
    own: dict[str, Any] = {leaf: read(f"{bank}/delta/{name}/{leaf}") for leaf in form.leaf_names(matrix)}
    shared: dict[str, Any] = {leaf: read(f"{bank}/delta/{leaf}") for leaf in form.shared_leaves}
    dtype = np.dtype(dtype or (np.float32 if base is None else base.dtype))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for expert in range(_count(form, own | shared)) if experts is None else experts:
            place = own_of(form, expert)
            leaves = place.arrays(own)
            common = {leaf: array if leaf in form.common_leaves else array[expert] for leaf, array in shared.items()}
            arrays = place.form.combine(matrix, leaves, common)
            yield np.asarray(_kernel(base, arrays, form=place.form, matrix=matrix, dtype=dtype))


def _count(form: KernelForm, arrays: Mapping[str, Any]) -> int:
    """The number of experts in the stored leaves of a matrix."""
    if isinstance(form, ByExpert):
        return form.num_experts
    return next(array for path, array in arrays.items() if path not in form.common_leaves).shape[0]


def base_kernel(read: Reader, config: BankConfig, bank: str, matrix: Matrix) -> np.ndarray:
    """The base of a matrix, [in, out]: as it is stored, or of codes the float32 numbers that they stand for.

    Args:
      read: reads a leaf by its path.
      config: of the bank, which has a base.
      bank: the path of the bank.
      matrix: one of `ffn_matrices`.
    """
    paths = base_leaves(config, matrix)
    if not paths:
        return np.zeros(matrix.shape, np.float32)
    leaves = {leaf: read(f"{bank}/{path}") for leaf, path in paths.items()}
    if config.base_codes is None:
        return leaves["kernel"]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return np.asarray(_base_of_codes(leaves, config.base_codes.form.of_matrix(matrix), matrix))


def base_leaves(config: BankConfig, matrix: Matrix) -> dict[str, str]:
    """The leaves that store the base of a matrix, by their names: paths below the bank."""
    if not config.has_base_of(matrix.name):
        return {}
    names = ("kernel",) if config.base_codes is None else config.base_codes.form.of_matrix(matrix).leaf_names(matrix)
    return {name: f"base/{matrix.name}/{name}" for name in names}


@partial(jax.jit, static_argnames=("form", "matrix"))
def _base_of_codes(leaves: dict[str, Array], form: Coded, matrix: Matrix) -> Float[Array, "i o"]:
    return form.materialise(None, leaves, matrix)


@partial(jax.jit, static_argnames=("form", "matrix", "dtype"))
def _kernel(
    base: Float[Array, "i o"] | None, arrays: dict[str, Array], form: KernelForm, matrix: Matrix, dtype: np.dtype
) -> Float[Array, "i o"]:
    wide = None if base is None else base.astype(jnp.float32)
    return form.tile(wide, arrays, Window.all(matrix.shape)).astype(dtype)


def leaves_from_dense(
    config: BankConfig,
    expert: FFNConfig,
    num_experts: int,
    kernels: Mapping[str, Float[np.ndarray, "i o"]],
    streams: Callable[[str, int, int], np.random.Generator],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the leaves, except biases, of a bank whose experts all equal a dense FFN, in the dtype of its kernels.

    Args:
      config: of the bank.
      expert: the shape of the FFN.
      num_experts: E.
      kernels: the kernels of the FFN, by name.
      streams: `streams(matrix, purpose, expert)` is a NumPy generator of its own; purposes are in `moe_jax.core.draws`.

    Yields:
      Paths below the bank, and leaves. A leaf that repeats a kernel for every expert is a view with stride 0.

    Raises:
      InputError: if such experts cannot equal a dense FFN.
    """
    form = config.form
    if not isinstance(form, KernelForm) or (form.over_base and not config.has_base):
        raise InputError(f"{config.kind} experts with base {config.base!r} are not made from a dense FFN")
    if config.base_codes is not None:
        raise InputError("a base in codes does not equal a dense FFN: it is made by moe-jax compress --centre-bits")
    for name, matrix in ffn_matrices(expert, kernels["up"].shape[0]).items():
        kernel, folder = kernels[name], f"delta/{name}" if form.over_base else name
        if form.over_base:
            yield f"base/{name}/kernel", kernel
        own = form.from_dense(kernel, matrix, num_experts, partial(streams, name))
        yield from ((f"{folder}/{leaf}", array) for leaf, array in own.items())
    dtype = jnp.dtype(kernels["up"].dtype)
    if isinstance(form, CodedJointly):
        yield from (
            (f"delta/{leaf}", np.asarray(array))
            for leaf, array in form.fresh_shared(expert, (num_experts,), dtype).items()
        )
