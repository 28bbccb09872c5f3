"""Modules that hold arrays by their paths, and linear maps, whose kernel may be stored in codes and may have LoRA."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Shaped, UInt16

from moe_jax.experts.forms.kernel_of_codes import Coded
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.forms.whole import Full, WithLoRA, whole_form
from moe_jax.experts.forms.whole_as_bits import WholeAsBits
from moe_jax.experts.shapes import FFNConfig, LoRAConfig, Matrix, Split, ffn_matrices
from moe_jax.functional.dense import Product, hidden, linear, sum_of_products
from moe_jax.functional.keys import fold_in


class Fixed(nnx.Variable):
    """An array that is saved with the model and never trained: positions, codes, scales of NF4 kernels."""


class OfAllLayers(Fixed):
    """An array of all layers that are stacked, which a loop over them gives to every turn as it is."""


def of_one_layer(array: Shaped[Array, "N ..."], places: Int[Array, " n"]) -> Shaped[Array, "n ..."]:
    """Returns the part of an array of all layers that one layer has, whose places in it follow one another."""
    return lax.dynamic_slice_in_dim(array, places[0], places.shape[0])


def taken(variable: nnx.Variable) -> Any:
    """Returns the array of a variable, which then holds none: variables live on until Python looks for cycles, and the
    array with them."""
    array = variable.get_value()
    variable.set_raw_value(None)
    return array


class Leaves(nnx.Module):
    """Holds arrays as attributes: the path `nf4/codes` is the attribute `codes` of the attribute `nf4`."""

    def __init__(self, arrays: Mapping[str, Array], is_trained: Callable[[str, Array], bool] = lambda *_: True):
        """Makes a variable of every array.

        Args:
          arrays: by path.
          is_trained: `is_trained(path, array)` says whether the variable is an `nnx.Param` or `Fixed`.
        """
        self.add({path: (nnx.Param if is_trained(path, array) else Fixed)(array) for path, array in arrays.items()})

    def add(self, variables: Mapping[str, nnx.Variable]) -> None:
        """Gives it more variables, by path."""
        for path, variable in variables.items():
            name, slash, rest = path.partition("/")
            if not slash:
                setattr(self, name, variable)
                continue
            if not hasattr(self, name):
                setattr(self, name, Leaves({}))
            getattr(self, name).add({rest: variable})

    def arrays(self) -> dict[str, Array]:
        """The arrays by path."""
        found: dict[str, Array] = {}
        for name, value in vars(self).items():
            if isinstance(value, nnx.Variable):
                found[name] = value[...]
            elif isinstance(value, Leaves):
                found |= {f"{name}/{path}": array for path, array in value.arrays().items()}
        return found


BIAS = "bias"


class Linear(Leaves):
    """`x W + b`. The kernel [in, out] is plain or stored in codes, and may have LoRA, `scale * (x A) B`, beside it."""

    kernel: nnx.Param
    transposed: nnx.Variable

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        bias: bool = False,
        nf4: bool = False,
        codes: Coded | None = None,
        lora: LoRAConfig | None = None,
        split: Split = "out",
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
    ):
        """Initialises the parameters.

        Args:
          shape: [in, out].
          bias: whether the map has a bias.
          nf4: whether the kernel is stored as NF4.
          codes: other codes in which it is stored; None: there are none.
          lora: options of LoRA; None: there is none.
          split: the axis of the kernel that `tensor` splits.
          rngs: random keys, stream `params`.
          dtype: dtype of the parameters.
        """
        self.form = whole_form(nf4, lora, codes)
        self.matrix = Matrix("", shape, split)
        super().__init__(self.form.fresh(rngs, self.matrix, (), dtype), self.form.is_trained)
        self.has_bias = bias
        if bias:
            self.bias = nnx.Param(jnp.zeros(shape[1], dtype))

    def __call__(
        self, x: Float[Array, "... i"], key: Array | None = None, more: Product | None = None
    ) -> Float[Array, "... o"]:
        """Applies the map.

        Args:
          x: activations.
          key: random key for LoRA's dropout in training; None: no dropout.
          more: a product that is added; None: there is none.
        """
        y = self._product(x, key, more)
        return y + jnp.expand_dims(self.bias[...].astype(x.dtype), tuple(range(y.ndim - 1))) if self.has_bias else y

    def _product(self, x: Float[Array, "... i"], key: Array | None, more: Product | None) -> Float[Array, "... o"]:
        kernel = self._kernel()
        if more is not None and isinstance(self.form, Full):
            return sum_of_products(Product(x, kernel["kernel"].astype(x.dtype)), more)
        y = self.form.apply(x, kernel, self.matrix, key)
        return y if more is None else y + linear(*more)

    @property
    def every_form(self) -> tuple[KernelForm, ...]:
        """The form of the kernel; of a map of several layers, those of all its kernels."""
        return (self.form,)

    def in_codes(self, codes: Coded, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> "Linear":
        """Returns a fresh map of the same shape, with a bias and LoRA as this one has, and its kernel in codes."""
        lora = self.form.lora if isinstance(self.form, WithLoRA) else None
        options: Any = {"bias": self.has_bias, "lora": lora, "split": self.matrix.split}
        return Linear(self.matrix.shape, codes=codes, rngs=rngs, dtype=dtype, **options)

    def materialise(self) -> Float[Array, "i o"]:
        """The kernel with LoRA merged: float32, or a plain kernel without LoRA as it is stored."""
        return self.form.materialise(None, self._kernel(), self.matrix)

    def operand(self) -> Float[Array, "i o"] | UInt16[Array, "o i"]:
        """The kernel as products in `functional.synthesis` take it as a base: whole, or as bits [out, in]."""
        return self.transposed[...] if isinstance(self.form, WholeAsBits) else self.materialise()

    def _kernel(self) -> dict[str, Array]:
        return {path: array for path, array in self.arrays().items() if path != BIAS}


def ffn_linears(
    config: FFNConfig, d_model: int, *, bias: bool, codes: Coded | None = None, rngs: nnx.Rngs, dtype: jnp.dtype
) -> dict[str, Linear]:
    """The linear maps of an FFN, by name; with a bias each if `bias` is true, and their kernels in `codes`."""
    made: Any = {"bias": bias, "nf4": config.nf4, "rngs": rngs, "dtype": dtype}
    linears = {}
    for name, matrix in ffn_matrices(config, d_model).items():
        own, lora = None if codes is None else codes.of_matrix(matrix), lora_for(config.lora, name)
        linears[name] = Linear(matrix.shape, codes=own, lora=lora, split=matrix.split, **made)
    return linears


def lora_for(config: LoRAConfig | None, name: str) -> LoRAConfig | None:
    """The config if `name` is among its targets, else None."""
    return config if config is not None and name in config.targets else None


def apply_ffn(
    linears: Mapping[str, Linear], x: Float[Array, "... d"], activation: str, key: Array | None
) -> Float[Array, "... d"]:
    """Applies an FFN of `up`, `down`, and `gate` if it is gated. `key` is the random key for LoRA's dropout."""

    def project(name: str, x: Array) -> Array:
        return linears[name](x, fold_in(key, ("gate", "up", "down").index(name)))

    gate = project("gate", x) if "gate" in linears else None
    return project("down", hidden(project("up", x), gate, activation))
