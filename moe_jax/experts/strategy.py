"""The choice between the exact ways to apply experts over a base, by a small cost model (METHODS 3).

The model counts the floating-point operations of a call and the bytes of parameters that it reads; the costs of both
belong to the platform (`experts.platforms`). The attribute `strategy` of a bank overrules the model unless it is
`auto`. It is set when the bank is made, from the environment variable MOE_JAX_STRATEGY, and can be changed later:

    set_strategy(model, "synthesised")

The strategy is part of the graphdef, so that a step compiled for another strategy is not used.
"""

import logging
import os
from functools import lru_cache
from typing import TYPE_CHECKING

from moe_jax.errors import InputError, nearest, shown
from moe_jax.experts.config import FFNConfig
from moe_jax.experts.forms.matrix import Load, ffn_matrices
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.mesh import current_mesh
from moe_jax.experts.platforms import PLATFORMS, current_platform

if TYPE_CHECKING:
    from moe_jax.experts.bank_config import BankConfig

logger = logging.getLogger(__name__)

STRATEGIES = (
    "auto",
    "factored",
    "factored-side-by-side",
    "factored-grouped",
    "factored-entrywise",
    "synthesised",
)
"""`factored` leaves the choice between the factored ones open. A strategy that a form does not support is ignored."""

ENVIRONMENT = "MOE_JAX_STRATEGY"


def strategy_from_environment() -> str:
    """The value of MOE_JAX_STRATEGY; `auto` if it is not set.

    Raises:
      InputError: if it is not one of `STRATEGIES`.
    """
    return check_strategy(os.environ.get(ENVIRONMENT, "auto"), ENVIRONMENT)


def choose_strategy(config: "BankConfig", expert: FFNConfig, d_model: int, load: Load, asked: str = "auto") -> str:
    """Chooses `synthesised`, or `factored-` followed by a way to apply deltas (see `experts.factored`).

    Args:
      config: of the bank; its form is over a base.
      expert: the shape of an expert.
      d_model: width of the model.
      load: the numbers of experts and tokens.
      asked: the strategy of the bank, one of `STRATEGIES`.
    """
    return _choose(config, expert, d_model, load, asked, current_mesh() is None, current_platform())


@lru_cache(maxsize=1024)
def _choose(
    config: "BankConfig", expert: FFNConfig, d_model: int, load: Load, asked: str, alone: bool, platform: str
) -> str:
    """Cached, so that a choice is logged once."""
    assert isinstance(config.form, KernelForm)
    matrices = tuple(ffn_matrices(expert, d_model).values())
    costs = config.form.cost(matrices, load, PLATFORMS[platform], has_base=config.has_base)
    if config.has_base and (expert.nf4 or expert.lora is not None):
        # Inside a kernel's tile, LoRA would become `W + A B`, without its dropout. Over a mesh, sparse and quantised
        # deltas then have no better way than to sort rows that are sharded.
        costs.pop("synthesised")
        if not alone:
            costs = {name: cost for name, cost in costs.items() if name == "factored-side-by-side"} or costs
    elif not alone:
        # Rows sorted over a mesh would be gathered everywhere. Only `side-by-side` needs no exchange at all, and
        # `synthesised` is written by hand for a mesh.
        costs = {name: cost for name, cost in costs.items() if name in ("factored-side-by-side", "synthesised")}
    allowed = {name: cost for name, cost in costs.items() if asked == "auto" or name.startswith(asked)} or costs
    best = min(allowed, key=allowed.__getitem__)
    shown = ", ".join(f"{name} {cost:.2g}" for name, cost in costs.items())
    logger.info(
        "%s experts, %d tokens, top-%d, on %s: %s (costs: %s)",
        config.kind, load.tokens, load.top_k, platform, best, shown,
    )  # fmt: skip
    return best


def check_strategy(name: str, where: str) -> str:
    """Returns the name; raises `InputError` if it is not one of `STRATEGIES`."""
    if name not in STRATEGIES:
        raise InputError(f"{where} is {shown(name)}{nearest(name, STRATEGIES)}; it is one of {', '.join(STRATEGIES)}")
    return name
