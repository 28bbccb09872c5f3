"""Gives the kernels of a model that are whole and in bfloat16 as their bits, transposed, with which a CPU generates."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from moe_jax.core.data_sheets import available_memory
from moe_jax.experts.bank import KernelBank
from moe_jax.experts.bank_config import BankConfig
from moe_jax.experts.forms.low_rank import LowRank
from moe_jax.experts.forms.low_rank_as_bits import LowRankAsBits
from moe_jax.experts.forms.whole import Full
from moe_jax.experts.forms.whole_as_bits import WholeAsBits
from moe_jax.experts.linear import Fixed, Leaves, Linear, taken

_MOST_OF_MEMORY = 1 / 2
"""Share of the free memory that a leaf may take, which is in memory twice while it is transposed."""


def give_as_bits(model: nnx.Module) -> None:
    """Changes in place the linear maps of a model, and banks whose experts are whole or low-rank deltas.

    The kernels are arrays on one CPU, or only shapes. Those of routers stay as they are, and so does what memory has no
    room for.
    """
    for _, module in list(nnx.iter_modules(model)):
        if type(module) is Linear and module.form == Full():
            module.form = transpose_kernels(module) or module.form
        elif isinstance(module, KernelBank) and module.config.form == Full() and not module.expert.nf4:
            form = transpose_kernels(*(getattr(module, name) for name in module.matrices))
            module.config = module.config if form is None else BankConfig(form)
        elif isinstance(module, KernelBank) and isinstance(module.config.form, LowRank):
            factors = {
                f"{name}/{leaf}": getattr(getattr(module.delta, name), leaf)
                for name in module.matrices
                for leaf in "ab"
            }
            if _have_room(factors.values()):
                form = LowRankAsBits(rank=module.config.form.rank)
                module.delta = Leaves({path: _bits(taken(factor)) for path, factor in factors.items()}, form.is_trained)
                module.config = module.config.of_same_base(form)


def _have_room(variables: Iterable[nnx.Variable]) -> bool:
    leaves, free = [variable.get_value() for variable in variables], available_memory()
    most = math.inf if free is None else free * _MOST_OF_MEMORY
    is_made = not isinstance(leaves[0], jax.ShapeDtypeStruct)
    return all(leaf.dtype == jnp.bfloat16 and not (is_made and leaf.nbytes > most) for leaf in leaves)


def transpose_kernels(*modules: Any) -> WholeAsBits | None:
    """Gives the bits of `kernel` of each module to its leaf `transposed`; returns their form.

    None: nothing was changed, as a kernel is not in bfloat16, or memory has no room for another one.
    """
    if not _have_room([module.kernel for module in modules]):
        return None
    for module in modules:
        module.transposed = Fixed(_bits(taken(module.kernel)))
        del module.kernel
    return WholeAsBits()


def _bits(leaf: Array | jax.ShapeDtypeStruct) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        *stack, rows, columns = leaf.shape
        return jax.ShapeDtypeStruct((*stack, columns, rows), jnp.uint16)
    # A view of an array of NumPy, which JAX copies faster than either would transpose.
    return jnp.asarray(np.asarray(leaf).view(np.uint16).swapaxes(-1, -2))
