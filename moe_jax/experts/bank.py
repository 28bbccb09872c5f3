"""The expert bank: a pytree that holds the experts of one layer and knows how to apply itself."""

import abc
import math
import re

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.config import BankConfig, FFNConfig
from moe_jax.functional.routing import Routing

INIT_STD = 0.02


class Weights(nnx.Module):
    """A kernel and a bias under their usual names; either may be absent."""

    def __init__(self, kernel: Array | None = None, bias: Array | None = None):
        if kernel is not None:
            self.kernel = nnx.Param(kernel)
        if bias is not None:
            self.bias = nnx.Param(bias)


class ExpertBank(nnx.Module, abc.ABC):
    """The experts of one layer. Nothing outside a bank asks which kind it is.

    Attributes:
      config: what the bank is made of.
      expert: the shape of one expert.
      num_experts: E.
    """

    def __init__(self, config: BankConfig, expert: FFNConfig, num_experts: int):
        self.config = config
        self.expert = expert
        self.num_experts = num_experts

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "T d"], routing: Routing, key: Array | None = None) -> Float[Array, "T d"]:
        """Sum over the chosen experts of weight times expert output, in the dtype of `x`.

        `key` is for what is random in training (dropout); None: nothing is.
        """

    @abc.abstractmethod
    def kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        """Materialises one expert: its kernels by name (`gate`, `up`, `down`), in the dtype of the base."""

    def biases(self, expert: int) -> dict[str, Float[Array, " o"]]:
        """Biases of one expert by name; empty where the FFN has none."""
        return {name: bias[expert] for name, bias in self.stacked_biases().items()}

    def stacked_biases(self) -> dict[str, Float[Array, "E o"]]:
        """Biases of all experts by name."""
        if not self.expert.bias:
            return {}
        return {name: getattr(self, name).bias[...] for name in self.expert.matrices}

    def frozen_leaves(self) -> re.Pattern[str]:
        """Matches the paths, below the bank, of parameters that are not trained."""
        return re.compile("^base/(?!.*/lora/)" if not self.config.train_base else "^$")

    def num_parameters(self) -> int:
        """Parameters of the bank; positions and codes, which are integers, are not counted (METHODS 8)."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))

    def num_bytes(self) -> int:
        """Bytes of everything the bank holds, integers included."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(self)))


def normal_kernel(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """A fresh kernel: normal with standard deviation 0.02."""
    return (INIT_STD * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


def add_stacked_biases(bank: ExpertBank, d_model: int, dtype: jnp.dtype) -> None:
    """Gives a bank without stacked kernels its zero per-expert biases, where its FFN has any."""
    if bank.expert.bias:
        for name, (_, width) in bank.expert.shapes(d_model).items():
            setattr(bank, name, Weights(bias=jnp.zeros((bank.num_experts, width), dtype)))
