"""Optimizers with warm-up, clipping, and separate rates for groups of parameters (Optax)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from moe_jax.distributed.sharding import path_name
from moe_jax.training.optim.parameter_groups import Rates, apply_rates
from moe_jax.training.optim.per_matrix import is_matrix, per_matrix
from moe_jax.training.recipe.schema import OptimizerSection, ScheduleSection

# If its updates have this root mean square, as AdamW's have on average, Muon can share AdamW's learning rate and weight
# decay (Liu et al. 2025, arXiv:2502.16982, section 2.2).
_MUON_RMS = 0.2


def learning_rate(section: OptimizerSection, schedule: ScheduleSection, steps: int) -> optax.Schedule:
    """Returns the learning rate by number of steps done: linear warm-up from 0, then decay to `final_ratio` at `steps`.

    The first step uses the first value of the warm-up above 0, and the last step uses the final value.
    """
    peak = section.learning_rate
    after_warmup = max(1, steps - schedule.warmup_steps)
    if schedule.kind == "cosine":
        decay = optax.cosine_decay_schedule(peak, after_warmup, alpha=schedule.final_ratio)
    elif schedule.kind == "linear":
        decay = optax.linear_schedule(peak, peak * schedule.final_ratio, after_warmup)
    elif schedule.kind == "wsd":
        last = decay_steps(schedule, steps)
        decay = optax.linear_schedule(
            peak, peak * schedule.final_ratio, last, transition_begin=max(0, after_warmup - last)
        )
    else:
        decay = optax.constant_schedule(peak)
    if schedule.warmup_steps:
        warmup = optax.linear_schedule(0.0, peak, schedule.warmup_steps)
        decay = optax.join_schedules([warmup, decay], [schedule.warmup_steps])
    # With a decay to 0, rounding would make the last rate slightly negative.
    return lambda done: jnp.maximum(decay(done + 1), 0.0)


def decay_steps(schedule: ScheduleSection, steps: int) -> int:
    """Number of steps over which the rate of `wsd` decays, at the end of `steps`; at most those after the warm-up."""
    wanted = schedule.decay_steps if schedule.decay_steps is not None else max(1, steps // 10)
    return max(1, min(wanted, steps - schedule.warmup_steps))


def make_optimizer(
    section: OptimizerSection, schedule: optax.Schedule, rates: Mapping[str, Rates] | None = None
) -> optax.GradientTransformation:
    """Makes the optimizer of a recipe, with clipping by global norm before it.

    Gradients are float32 whatever the parameters are, and so are moments unless the recipe says otherwise. `init` and
    `update` take states of trained parameters only (see `peft.split_model`).

    Args:
      section: of the recipe.
      schedule: learning rate by steps done.
      rates: of every parameter, by its path in memory, if the recipe has groups (`parameter_groups.group_rates`).
    """
    clip = optax.clip_by_global_norm(section.clip_norm) if section.clip_norm else optax.identity()
    decayed = optax.chain(_direction(section), apply_rates(section, rates), optax.scale_by_learning_rate(schedule))
    return in_float32(optax.chain(clip, decayed))


def _direction(section: OptimizerSection) -> optax.GradientTransformation:
    """Makes the transformation from gradients to updates, before decay and learning rate."""
    first = jnp.dtype(section.moments)
    if section.kind == "lion":
        return optax.scale_by_lion(section.b1, section.b2, mu_dtype=first)
    if section.kind == "adafactor":
        return per_matrix(_adafactor(section))
    adam = optax.scale_by_adam(section.b1, section.b2, section.eps, mu_dtype=first)
    if section.kind == "adamw":
        return adam

    def label(path: tuple, _: Any) -> str:
        return "muon" if is_orthogonalised(path_name(path)) else "adamw"

    matrices = optax.chain(
        optax.contrib.scale_by_muon(
            beta=section.momentum, mu_dtype=first, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers()
        ),
        _rms_of_adam(),
    )
    return optax.partition(
        {"muon": per_matrix(matrices), "adamw": adam}, lambda params: jax.tree_util.tree_map_with_path(label, params)
    )


def is_orthogonalised(path: str) -> bool:
    """Whether Muon updates the parameter at a path in memory: kernels of layers, and their low-rank factors.

    Embeddings, head, routers, norms, biases and values of sparse deltas get AdamW's updates.
    """
    return "segments/" in path and "/router/" not in path and is_matrix(path)


def _rms_of_adam() -> optax.GradientTransformation:
    """Scales orthogonal `[i, o]`, whose root mean square is `1 / sqrt(max(i, o))`, to that of `_MUON_RMS`."""

    def scaled(update: Any, _: Any) -> Any:
        return update * (_MUON_RMS * max(update.shape) ** 0.5)

    return optax.stateless_with_tree_map(scaled)


def _adafactor(section: OptimizerSection) -> optax.GradientTransformation:
    """As `optax.adafactor` without momentum, except that weight decay is multiplied by the learning rate here."""
    parts = [optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)]
    if section.parameter_scale:
        parts.append(optax.scale_by_param_block_rms())
    return optax.chain(*parts)


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs a transformation on float32 copies, so that bfloat16 parameters do not get bfloat16 moments."""

    def cast(tree):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def init(params):
        return inner.init(cast(params))

    def update(updates, state, params=None):
        return inner.update(cast(updates), state, cast(params))

    return optax.GradientTransformation(init, update)


def at_step(opt_state: optax.OptState, step: jax.Array) -> optax.OptState:
    """Returns a new state of an optimizer, with the schedule of its learning rate as after `step` steps."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def moved(node: Any) -> Any:
        return optax.ScaleByScheduleState(count=step) if is_schedule(node) else node

    return jax.tree.map(moved, opt_state, is_leaf=is_schedule)
