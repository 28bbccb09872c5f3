"""The choice between the exact ways to apply experts over a base, by a small cost model (methods.md 3).

The model counts the floating-point operations of a call and the bytes of parameters that it reads; what both take is
known of the chip that the program is lowered for (`experts.devices`). The attribute `strategy` of a bank overrules
the model unless it is `auto`. It is set when the bank is made, from the environment variable MOE_JAX_STRATEGY, and can
be changed later:

    set_strategy(model, "synthesised")

The strategy is part of the graphdef, so that a step compiled for another strategy is not used.
"""

import logging
import os
from collections.abc import Mapping
from functools import lru_cache

from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.experts.bank_config import BankConfig
from moe_jax.experts.devices import Cost, Platform, current_chip, current_mesh
from moe_jax.experts.forms.optional import costs_by_strategy
from moe_jax.experts.forms.protocol import KernelForm
from moe_jax.experts.forms.whole import whole_form
from moe_jax.experts.shapes import FFNConfig, Load, ffn_matrices

logger = logging.getLogger(__name__)

STRATEGIES = ("auto", "factored", "factored-side-by-side", "factored-grouped", "factored-entrywise", "synthesised")
"""`factored` leaves the choice between the factored ones open. A strategy that a form does not support is ignored."""

ENVIRONMENT = "MOE_JAX_STRATEGY"

# Of the entries of the base: what deltas that every device of a mesh has may come to.
_MOST_OF_BASE = 0.25


def strategy_from_environment() -> str:
    """The value of MOE_JAX_STRATEGY; `auto` if it is not set.

    Raises:
      InputError: if it is not one of `STRATEGIES`.
    """
    return check_strategy(os.environ.get(ENVIRONMENT, "auto"), ENVIRONMENT)


def choose_strategy(
    config: BankConfig, expert: FFNConfig, d_model: int, load: Load, itemsize: int = 4, asked: str = "auto"
) -> str:
    """Chooses `synthesised`, or `factored-` followed by a way to apply deltas (see `experts.factored`).

    Args:
      config: of the bank; its form is over a base.
      expert: the shape of an expert.
      d_model: width of the model.
      load: the numbers of experts and tokens.
      itemsize: bytes of a number of the activations; parameters count as if they had as many.
      asked: the strategy of the bank, one of `STRATEGIES`.
    """
    platform = Platform.of(current_chip(), itemsize)
    return strategy_on(platform, config, expert, d_model, load, asked, alone=current_mesh() is None)


def strategy_costs(
    config: BankConfig, expert: FFNConfig, d_model: int, load: Load, platform: Platform, *, alone: bool = True
) -> dict[str, Cost]:
    """Returns the cost of every strategy that a bank has; empty if nothing is chosen for such experts.

    Args:
      config, expert, d_model, load: see `choose_strategy`. Whole kernels have one way, `grouped`; their LoRA is
        not counted.
      platform: on which.
      alone: there is one device.
    """
    matrices = tuple(ffn_matrices(expert, d_model).values())
    if not config.form.over_base:
        costs = costs_by_strategy(whole_form(expert.nf4, None), matrices, load, platform, based=())
        return {"grouped": costs["synthesised"]}
    if not isinstance(config.form, KernelForm):
        return {}
    # The kernels of a base in codes are not read as they are, but made: see `costs_by_strategy`.
    codes = None if config.base_codes is None else config.base_codes.form
    based = tuple(matrix for matrix in matrices if config.has_base_of(matrix.name))
    costs = costs_by_strategy(config.form, matrices, load, platform, based=based, codes=codes)
    if config.has_base and (expert.nf4 or expert.lora is not None):
        # Inside a kernel's tile, LoRA would become `W + A B`, without its dropout.
        costs.pop("synthesised")
    elif not alone and not _is_small(config, expert, d_model, load.num_experts):
        # The factored ways exchange no tokens, but rows are sorted by every device, which then needs all deltas.
        costs = {name: cost for name, cost in costs.items() if name in ("factored-side-by-side", "synthesised")}
    return costs


def _is_small(config: BankConfig, expert: FFNConfig, d_model: int, num_experts: int) -> bool:
    """Whether every device of a mesh may have the deltas of all experts, beside its part of the base."""
    base = sum(matrix.size for matrix in ffn_matrices(expert, d_model).values())
    return num_experts * config.form.multiplied_entries(expert, d_model) <= _MOST_OF_BASE * base


@lru_cache(maxsize=1024)
def strategy_on(
    platform: Platform, config: BankConfig, expert: FFNConfig, d_model: int, load: Load, asked="auto", *, alone: bool
) -> str:
    """Does what `choose_strategy` does for a given platform, with one device or over a mesh (not `alone`).

    Cached, so that a choice is logged once.
    """
    costs = strategy_costs(config, expert, d_model, load, platform, alone=alone)
    if not alone and asked == "auto" and len(costs) > 1 and _is_small(config, expert, d_model, load.num_experts):
        # Kernels made in the product need their tokens, which then travel; small deltas do not.
        costs.pop("synthesised", None)
    best = cheapest(costs, asked)
    shown = ", ".join(f"{name} {1e6 * cost.total:.2g}" for name, cost in costs.items())
    logger.info(
        "%s experts, %d tokens, top-%d, on %s: %s (microseconds: %s)",
        config.kind, load.tokens, load.top_k, platform.chip.name, best, shown,
    )  # fmt: skip
    return best


def cheapest(costs: Mapping[str, Cost], asked: str = "auto") -> str:
    """The strategy that takes least among those that `asked` leaves, or among all if it leaves none."""
    allowed = [name for name in costs if asked == "auto" or name.startswith(asked)] or list(costs)
    return min(allowed, key=lambda name: costs[name].total)


def check_strategy(name: str, where: str) -> str:
    """Returns the name; raises `InputError` if it is not one of `STRATEGIES`."""
    if name not in STRATEGIES:
        raise InputError(f"{where} is {shown(name)}{nearest(name, STRATEGIES)}; it is one of {', '.join(STRATEGIES)}")
    return name
