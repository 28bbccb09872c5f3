"""Optimizers with warm-up, clipping, and separate rates for groups of parameters (Optax)."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from moe_jax.distributed.sharding import path_name
from moe_jax.training.optim.parameter_groups import Rates, apply_rates
from moe_jax.training.optim.per_matrix import is_matrix, per_matrix
from moe_jax.training.recipe import OptimizerSection, ScheduleSection

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


class Placed(NamedTuple):
    """Shape of a parameter, and how it is split."""

    shape: tuple[int, ...]
    spec: P


def state_specs(opt_state: optax.OptState, params: Mapping[str, Placed]) -> Any:
    """Returns the partition specs of the arrays of an optimizer's state.

    Args:
      opt_state: arrays or ShapeDtypeStructs.
      params: of the trained parameters, by path in memory.

    Returns:
      The same tree with a PartitionSpec for every leaf. An array of a parameter's shape gets the parameter's spec; an
      array that lacks one of the axes of its matrix (the factors of Adafactor's second moment) gets the spec of the
      others; small ones, such as counters and constants of a matrix, are replicated.
    """
    # Path of the parameter, as it stands in the path of a leaf that belongs to it.
    inside = {f"/{path}/": placed for path, placed in params.items()}

    def spec(path: tuple, leaf: Any) -> P:
        name = f"/{path_name(path).replace('.', '/')}/"
        owners = [key for key in inside if key in name]
        if not leaf.ndim or not owners:
            return P()
        return _spec_like(leaf.shape, inside[max(owners, key=len)], is_column="/v_col/" in name)

    return jax.tree_util.tree_map_with_path(spec, opt_state)


def _spec_like(shape: tuple[int, ...], param: Placed, *, is_column: bool) -> P:
    if shape == param.shape:
        return param.spec
    ndim = len(param.shape)
    axes = (*param.spec, *(None,) * (ndim - len(param.spec)))
    fitting = [axis for axis in range(max(0, ndim - 2), ndim) if _without(param.shape, axis) == shape]
    if not fitting:
        return P()
    # Both fit a square matrix. Optax then takes the means of rows along the last axis.
    return P(*_without(axes, fitting[0] if is_column else fitting[-1]))


def _without(items: tuple, index: int) -> tuple:
    return items[:index] + items[index + 1 :]


def first_average(params: nnx.State) -> nnx.State:
    """Returns the average before the first step: the parameters, as float32."""
    # A copy, even where a parameter is float32 already: both are donated to the step.
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)


def next_average(average: nnx.State, params: nnx.State, step: Int[Array, ""], decay: float) -> nnx.State:
    """Returns the average after a step.

    Args:
      average: before the step, float32.
      params: after the step.
      step: number of steps done, including this one.
      decay: share of itself that the average keeps; early steps keep less, (1 + step) / (10 + step), so that it does
        not stay near the first parameters for long.
    """
    done = jnp.asarray(step, jnp.float32)
    new = 1.0 - jnp.minimum(decay, (1.0 + done) / (10.0 + done))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    return cast(nnx.State, optax.incremental_update(cast(Any, params), cast(Any, average), new))


def in_dtypes_of(params: nnx.State, average: nnx.State) -> nnx.State:
    """Returns the average as parameters: in the dtypes of `params`."""
    return jax.tree.map(lambda like, leaf: leaf.astype(like.dtype), params, average)
