"""Gives the NF4 kernels of linear maps as codes of a table, with which a CPU multiplies few rows (`Quantized`)."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.forms.kernel_of_codes import NF4, CodedLevels, CodedNF4
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.forms.quantized import Quantized
from moe_jax.experts.forms.whole import WithLoRA
from moe_jax.experts.linear import Leaves, Linear
from moe_jax.functional.codes import BLOCK, LEVELS, block_scales

# The codes themselves are packed alike. A scale is a number here and not a code of one, for a tenth more bytes.
_AS_TABLE = CodedLevels(codes=Quantized(bits=4, group_size=BLOCK, scale_bits=32, table=True))
_FOLDER = CodedLevels.folder.rstrip("/")


def give_nf4_as_table(model: nnx.Module) -> None:
    """Changes in place the linear maps of a model whose kernels are in NF4: their products are the same.

    The kernels are arrays on one CPU, or only shapes. Those of experts stay as they are.
    """
    for _, module in list(nnx.iter_modules(model)):
        if type(module) is Linear and (form := _as_table(module.form)) is not None:
            folder = "coded_nf4" if hasattr(module, "coded_nf4") else "nf4"
            stored = {name: leaf.get_value() for name, leaf in vars(getattr(module, folder)).items() if _is_leaf(leaf)}
            made = _leaves(stored)
            delattr(module, folder)
            setattr(module, _FOLDER, Leaves(made, lambda *_: False))
            module.form = form


def _is_leaf(value: Any) -> bool:
    return isinstance(value, nnx.Variable)


def _as_table(form: KernelForm) -> KernelForm | None:
    if isinstance(form, WithLoRA):
        kernel = _as_table(form.kernel)
        return None if kernel is None else dataclasses.replace(form, kernel=kernel)
    return _AS_TABLE if isinstance(form, NF4 | CodedNF4) else None


def _leaves(of_nf4: dict[str, Any]) -> dict[str, Any]:
    """Returns the leaves of a kernel, or of stacked ones, as the table has them; shapes of shapes."""
    codes = of_nf4["codes"]
    scales, table = _scales, partial(jnp.broadcast_to, jnp.asarray(LEVELS), (*codes.shape[:-2], len(LEVELS)))
    if isinstance(codes, jax.ShapeDtypeStruct):
        return {"codes": codes, "scales": jax.eval_shape(scales, of_nf4), "table": jax.eval_shape(table)}
    return {"codes": codes, "scales": scales(of_nf4), "table": table()}


@jax.jit
def _scales(leaves: dict[str, Array]) -> Float[Array, "... b o"]:
    if leaves["codes"].ndim > 2:
        return jax.lax.map(_scales, leaves)
    width = leaves["codes"].shape[-1]
    return block_scales(leaves, width, 0, width)
