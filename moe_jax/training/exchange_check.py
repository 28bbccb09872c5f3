"""Checks that the exchange of rows between experts computes the right result on these devices.

`ragged_all_to_all` has been reported to give wrong gradients in the first backward pass of a program on GPUs, where XLA
overlaps it with other work. Such a run only learns less, and nothing else would notice. So the first step that a
process computes is compared with the same step by all-gather, whose collectives are in common use.
"""

import math
from collections.abc import Callable

import jax
from flax import nnx

from moe_jax.core.errors import InputError
from moe_jax.experts import ExpertBank, set_exchange
from moe_jax.training.program import Program, metrics_of
from moe_jax.training.recipe.schema import Recipe
from moe_jax.training.step import StepMetrics, TrainState

# Relative tolerance of the loss and of the gradient's norm: the order of sums differs.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}


def exchange_check(recipe: Recipe, program: Program) -> Callable[..., Callable[[StepMetrics], None]] | None:
    """Makes the check of a run's first step; None: there is nothing to check.

    By default there is a check on GPUs if tokens come to experts by all-to-all; `model.check_exchange` overrides this.

    Returns:
      A function of the step's arguments. It computes the step by all-gather, without an update, and returns another
      function, which compares the metrics of the real step, and raises `InputError` where they differ.
    """
    asked = recipe.model.check_exchange
    platform = program.mesh.devices.flat[0].platform
    if asked is False or asked is None and platform not in ("gpu", "cuda"):
        return None
    experts = program.mesh.shape["expert"]
    banks = [module for _, module in nnx.iter_modules(program.model) if isinstance(module, ExpertBank)]
    # Whatever the number of experts per token, `chosen` says all-gather where there are few devices.
    if experts == 1 or all(bank.exchange.way == "all-gather" for bank in banks):
        return None
    by_gather = metrics_of(recipe, program, lambda model: set_exchange(model, "all-gather"))

    def before(
        state: TrainState, frozen: nnx.State, batch: dict[str, jax.Array], *teacher: nnx.State
    ) -> Callable[[StepMetrics], None]:
        expected = jax.device_get(by_gather(state, frozen, batch, *teacher))

        def after(metrics: StepMetrics) -> None:
            tolerance = _TOLERANCE[recipe.model.compute_dtype]
            for name in ("loss", "grad_norm"):
                found, right = float(getattr(metrics, name)), float(getattr(expected, name))
                # A loss that is not finite either way is no fault of the exchange, and the loop reports it.
                if math.isfinite(right) and not abs(found - right) <= tolerance * abs(right):
                    raise InputError(
                        f"the first step's {name} is {found:.6g} with tokens exchanged by all-to-all, and {right:.6g} "
                        "by all-gather: the exchange does not work on these devices; set model.exchange = 'all-gather'"
                    )

        return after

    return before
