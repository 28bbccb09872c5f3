"""From a description to a bank."""

import jax.numpy as jnp
from flax import nnx

from moe_jax.experts.adapters import AdapterBank
from moe_jax.experts.bank import ExpertBank
from moe_jax.experts.config import BankConfig, FFNConfig
from moe_jax.experts.full import FullBank
from moe_jax.experts.shared_base import SharedBaseBank


def make_bank(
    config: BankConfig, expert: FFNConfig, num_experts: int, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype
) -> ExpertBank:
    """Makes a freshly initialised bank.

    Args:
      config: what the bank is made of.
      expert: the shape of one expert.
      num_experts: E.
      d_model: width of the model.
      rngs: random keys, stream `params`.
      dtype: dtype of the parameters.
    """
    bank = {"full": FullBank, "adapter": AdapterBank}.get(config.kind, SharedBaseBank)
    return bank(config, expert, num_experts, d_model, rngs=rngs, dtype=dtype)
