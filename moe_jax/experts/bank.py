"""The expert bank: a module that holds the experts of one layer and applies them."""

import abc
import math
import re
from typing import TYPE_CHECKING

import jax
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.layout.config import FFNConfig
from moe_jax.experts.parallel.exchange import Exchange, exchange_from_environment
from moe_jax.experts.strategy import check_strategy, strategy_from_environment
from moe_jax.functional.routing import Routing

if TYPE_CHECKING:
    from moe_jax.experts.bank_config import BankConfig


class ExpertBank(nnx.Module, abc.ABC):
    """The experts of one layer. Code outside `experts/` never asks which form they have.

        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config, expert = moe_jax.BankConfig(kind="low-rank", rank=2), moe_jax.FFNConfig(dim=32)
        >>> bank = moe_jax.make_bank(config, expert, 4, 16, rngs=nnx.Rngs(0))
        >>> isinstance(bank, moe_jax.ExpertBank)
        True
        >>> routing, _ = moe_jax.route(jnp.zeros((5, 4)), 2, "topk_softmax")
        >>> bank(jnp.ones((5, 16)), routing).shape, bank.kernels(0)["up"].shape
        ((5, 16), (16, 32))

    Attributes:
      config: the form of the experts.
      expert: the shape of one expert.
      num_experts: E.
      strategy: how the bank is applied; one of `experts.strategy.STRATEGIES`.
      exchange: how tokens come to the experts over a mesh.
    """

    def __init__(self, config: "BankConfig", expert: FFNConfig, num_experts: int):
        self.config = config
        self.expert = expert
        self.num_experts = num_experts
        self.strategy = strategy_from_environment()
        self.exchange = exchange_from_environment()

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "T d"], routing: Routing, key: Array | None = None) -> Float[Array, "T d"]:
        """The weighted sum of the outputs of the chosen experts, in the dtype of `x`.

        Args:
          x: tokens.
          routing: chosen experts and weights. An expert outside [0, E) contributes nothing.
          key: random key for dropout in training; None: no dropout.
        """

    @abc.abstractmethod
    def kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        """The kernels of one expert by name (`gate`, `up`, `down`), in the dtype of the base; LoRA is merged.

        Raises:
          InputError: if the experts are not FFNs.
        """

    def biases(self, expert: int) -> dict[str, Float[Array, " o"]]:
        """The biases of one expert by name; empty if the FFN has none."""
        return {name: bias[expert] for name, bias in self.stacked_biases().items()}

    def stacked_biases(self) -> dict[str, Float[Array, "E o"]]:
        """The biases of all experts by name; empty if the FFN has none."""
        if not self.expert.bias:
            return {}
        return {name: getattr(self, name).bias[...] for name in self.expert.matrices}

    def frozen_leaves(self) -> re.Pattern[str]:
        """Matches the paths, below the bank, of parameters that the config freezes."""
        return re.compile("^base/(?!.*/lora/)" if not self.config.train_base else "^$")

    def num_parameters(self) -> int:
        """The number of parameters; positions and codes are not parameters (methods.md 8)."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))

    def num_bytes(self) -> int:
        """The bytes of all leaves, positions and codes included."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(self)))


def set_strategy(model: nnx.Module, name: str) -> None:
    """Sets the strategy of a bank, or of every bank in a model.

    A graphdef that was split from the model before, and a step compiled for it, keep the strategy that they had.

    Args:
      model: changed in place.
      name: one of `experts.strategy.STRATEGIES`.

    Raises:
      InputError: for another name.
    """
    check_strategy(name, "strategy")
    for _, module in nnx.iter_modules(model):
        if isinstance(module, ExpertBank):
            module.strategy = name


def set_exchange(model: nnx.Module, text: str) -> None:
    """Sets how tokens come to experts over a mesh, in a bank or in every bank of a model.

    Args:
      model: changed in place.
      text: see `Exchange.parse`.

    Raises:
      InputError: for another text.
    """
    exchange = Exchange.parse(text, "exchange")
    for _, module in nnx.iter_modules(model):
        if isinstance(module, ExpertBank):
            module.exchange = exchange
