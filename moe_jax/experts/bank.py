"""The expert bank: a module that holds the experts of one layer and knows how to apply itself."""

import abc
import math
import re
from typing import TYPE_CHECKING

import jax
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.experts.config import FFNConfig
from moe_jax.experts.strategy import check_strategy, strategy_from_environment
from moe_jax.functional.routing import Routing

if TYPE_CHECKING:
    from moe_jax.experts.bank_config import BankConfig


class ExpertBank(nnx.Module, abc.ABC):
    """The experts of one layer. Nothing outside a bank asks which kind it is.

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
      config: what the bank is made of.
      expert: the shape of one expert.
      num_experts: E.
      strategy: which of several exact ways it is applied in; see `experts.strategy`.
    """

    def __init__(self, config: "BankConfig", expert: FFNConfig, num_experts: int):
        self.config = config
        self.expert = expert
        self.num_experts = num_experts
        self.strategy = strategy_from_environment()

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "T d"], routing: Routing, key: Array | None = None) -> Float[Array, "T d"]:
        """Sum over the chosen experts of weight times expert output, in the dtype of `x`.

        `key` is for what is random in training (dropout); None: nothing is.
        """

    @abc.abstractmethod
    def kernels(self, expert: int) -> dict[str, Float[Array, "i o"]]:
        """Materialises one expert: its kernels by name (`gate`, `up`, `down`), in the dtype of the base.

        Raises:
          InputError: if the experts of this bank are no FFNs of their own.
        """

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


def set_strategy(model: nnx.Module, name: str) -> None:
    """Sets the strategy of every bank in a model, or of a bank; see `experts.strategy`.

    What was split off before (a graphdef, a compiled step) keeps the strategy that it was made with.

    Args:
      model: is changed in place.
      name: one of `experts.strategy.STRATEGIES`.

    Raises:
      InputError: for another name.
    """
    check_strategy(name, "strategy")
    for _, module in nnx.iter_modules(model):
        if isinstance(module, ExpertBank):
            module.strategy = name
