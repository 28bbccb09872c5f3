"""Optimizers with warm-up, clipping, and separate rates for groups of parameters (Optax)."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import clipped, nearest, raise_if_any, shown
from moe_jax.distributed.sharding import path_name
from moe_jax.peft.trained import full_matches
from moe_jax.training.recipe import OptimizerSection, ScheduleSection

# If its updates have this root mean square, as AdamW's have on average, Muon can share AdamW's learning rate and weight
# decay (Liu et al. 2025, arXiv:2502.16982, section 2.2).
_MUON_RMS = 0.2
# With `parameter_scale`, no matrix counts as smaller for AdamW: biases begin at zero, and have to move.
_LEAST_RMS = 1e-4


def learning_rate(section: OptimizerSection, schedule: ScheduleSection, steps: int) -> optax.Schedule:
    """Returns the learning rate by number of steps done: linear warm-up from 0, then decay to `final_ratio` at `steps`.

    The first step uses the first value of the warm-up above 0, and the last step uses the final value.
    """
    peak = section.learning_rate
    last = after_warmup = max(1, steps - schedule.warmup_steps)
    if schedule.kind == "cosine":
        decay = optax.cosine_decay_schedule(peak, after_warmup, alpha=schedule.final_ratio)
    elif schedule.kind == "constant":
        decay = optax.constant_schedule(peak)
    else:
        if schedule.kind == "wsd":
            wanted = schedule.decay_steps if schedule.decay_steps is not None else max(1, steps // 10)
            last = min(wanted, after_warmup)
        decay = optax.linear_schedule(peak, peak * schedule.final_ratio, last, transition_begin=after_warmup - last)
    if schedule.warmup_steps:
        warmup = optax.linear_schedule(0.0, peak, schedule.warmup_steps)
        decay = optax.join_schedules([warmup, decay], [schedule.warmup_steps])
    # With a decay to 0, rounding would make the last rate slightly negative.
    return lambda done: jnp.maximum(decay(done + 1), 0.0)


PerLayer = float | tuple[float, ...]


class Rates(NamedTuple):
    """Rates of a parameter in memory; if they differ between the layers stacked in it, one number for each.

    `factor` is its learning rate, relative to that of the optimizer, and `decay` its weight decay.
    """

    factor: PerLayer
    decay: PerLayer


def make_optimizer(
    section: OptimizerSection, schedule: optax.Schedule, rates: Mapping[str, Rates] | None = None
) -> optax.GradientTransformation:
    """Makes the optimizer of a recipe, with clipping by global norm before it.

    Gradients are float32 whatever the parameters are, and so are moments unless the recipe says otherwise. `init` and
    `update` take states of trained parameters only (see `peft.split_model`). `schedule` is the learning rate by steps
    done, and `rates` are those of every parameter, by its path in memory, if the recipe has groups (`group_rates`).
    """
    clip = optax.clip_by_global_norm(section.clip_norm) if section.clip_norm else optax.identity()
    decayed = optax.chain(_direction(section), _apply_rates(section, rates), optax.scale_by_learning_rate(schedule))
    return _in_float32(optax.chain(clip, decayed))


def _direction(section: OptimizerSection) -> optax.GradientTransformation:
    """Makes the transformation from gradients to updates, before decay and learning rate."""
    first = jnp.dtype(section.moments)
    if section.kind == "lion":
        return optax.scale_by_lion(section.b1, section.b2, mu_dtype=first)
    if section.kind == "adafactor":
        # As `optax.adafactor` without momentum, except that weight decay is multiplied by the learning rate here.
        factored = [optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)]
        scale = [optax.scale_by_param_block_rms()] if section.parameter_scale else []
        return _per_matrix(optax.chain(*factored, *scale))
    adam = optax.scale_by_adam(section.b1, section.b2, section.eps, mu_dtype=first)
    if section.kind == "adamw":
        if not section.parameter_scale:
            return adam
        return optax.chain(adam, _per_matrix(optax.scale_by_param_block_rms(_LEAST_RMS)))

    def label(path: tuple, _: Any) -> str:
        return "muon" if is_orthogonalised(path_name(path)) else "adamw"

    def with_rms_of_adam(update: Any, _: Any) -> Any:
        # The root mean square of an orthogonal [i, o] is `1 / sqrt(max(i, o))`.
        return update * (_MUON_RMS * max(update.shape) ** 0.5)

    orthogonal = optax.contrib.scale_by_muon(
        beta=section.momentum, mu_dtype=first, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers()
    )
    muon = _per_matrix(optax.chain(orthogonal, optax.stateless_with_tree_map(with_rms_of_adam)))
    return optax.partition({"muon": muon, "adamw": adam}, partial(jax.tree_util.tree_map_with_path, label))


def is_orthogonalised(path: str) -> bool:
    """Whether Muon updates the parameter at a path in memory: kernels of layers, and their low-rank factors.

    Embeddings, head, routers, norms, biases and values of sparse deltas get AdamW's updates.
    """
    return "segments/" in path and "/router/" not in path and _is_matrix(path)


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs a transformation on float32 copies, so that bfloat16 parameters do not get bfloat16 moments."""

    def cast(tree):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def update(updates, state, params=None):
        return inner.update(cast(updates), state, cast(params))

    return optax.GradientTransformation(lambda params: inner.init(cast(params)), update)


def group_rates(section: OptimizerSection, leaves: Mapping[str, Sequence[str]]) -> dict[str, Rates]:
    """Returns the rates of trained parameters, by path in memory.

    If several groups name a parameter, the first one counts. `leaves`: path of a parameter in memory -> its leaf paths,
    one for each layer stacked in it.

    Raises:
      InputError: for a pattern that is not a regular expression, takes too long, or matches no trained parameter.
    """
    every = [leaf for names in leaves.values() for leaf in names]
    patterns = [(group, pattern) for group in section.groups for pattern in group.match]
    problems: list[str] = []
    found: dict[str, Any] = {}
    hits = full_matches([pattern for _, pattern in patterns], every)
    for (group, pattern), matched in zip(patterns, hits, strict=False):
        if isinstance(matched, str):
            problems.append(f"{shown(pattern)} {clipped(matched)}")
        elif not matched:
            problems.append(f"{shown(pattern)} matches no trained parameter{nearest(pattern, every)}")
        else:
            found = dict.fromkeys(matched, group) | found
    raise_if_any(problems, "optimizer.groups (a pattern must match a whole leaf path)")

    def factor(leaf: str) -> float:
        rate = found[leaf].learning_rate if leaf in found else None
        return 1.0 if rate is None else rate / section.learning_rate

    def decay(path: str, leaf: str) -> float:
        own = found[leaf].weight_decay if leaf in found else None
        return _decay_of_optimizer(path, section) if own is None or _is_never_decayed(path) else own

    def merged(numbers: Sequence[float]) -> PerLayer:
        return numbers[0] if len(set(numbers)) == 1 else tuple(numbers)

    return {
        path: Rates(merged([factor(leaf) for leaf in names]), merged([decay(path, leaf) for leaf in names]))
        for path, names in leaves.items()
    }


def is_decayed(path: str, section: OptimizerSection) -> bool:
    """Whether weight decay applies to the parameter at `path`: not to norms, biases, and numbers of heads."""
    if _is_never_decayed(path):
        return False
    if re.search(r"(^|/)embed/", path):
        return section.decay_embeddings
    return section.decay_router if "/router/" in path else True


def _is_never_decayed(path: str) -> bool:
    """Whether the parameter at `path` belongs to a norm, is a bias, or is a number for each channel, head or expert.

    Recurrent layers have biases of other names (`rate_bias`, `q_conv_bias`), and rates and skips of heads, which decay
    would draw towards what means nothing there. Scales of quantised deltas, as many as a kernel has blocks, are decayed
    as the deltas would be.
    """
    return re.search(r"/((\w+_)?(scale|bias)|log_rate|skip|sinks)$", path) is not None


def _decay_of_optimizer(path: str, section: OptimizerSection) -> float:
    return section.weight_decay if is_decayed(path, section) else 0.0


def _apply_rates(section: OptimizerSection, rates: Mapping[str, Rates] | None) -> optax.GradientTransformation:
    """Adds its decay to the update of every parameter, and multiplies both by the factor of its learning rate."""

    def one(path: tuple, update: jax.Array, value: jax.Array) -> jax.Array:
        name = path_name(path)
        factor, decay = (1.0, _decay_of_optimizer(name, section)) if rates is None else rates[name]
        if decay:
            update = update + _shaped(decay, value) * value
        return update if factor == 1.0 else _shaped(factor, value) * update

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(one, updates, params))


def _shaped(number: PerLayer, like: jax.Array) -> float | jax.Array:
    """Returns the number, or the numbers of the layers along the first axis."""
    if not isinstance(number, tuple):
        return number
    return jnp.asarray(np.array(number, np.float32).reshape(-1, *(1,) * (like.ndim - 1)), like.dtype)


def _is_matrix(path: str) -> bool:
    """Whether a parameter's last two axes are a matrix; the last axis of others (norms, biases, values) is a vector."""
    matrix = r"(^|/)(kernel|a|b|factor|neurons|embedding|positions|table)$|/adapters/(down|up)$"
    return re.search(matrix, path) is not None


def _per_matrix(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a transformation of one array to every matrix, or vector, alone.

    Optax computes a root mean square, largest axes or singular vectors of whole arrays, but they are meant for one
    matrix. A kernel of experts [L, E, i, o] is L * E matrices, each of which must be updated as if it were a parameter.

    The state is a dict, path of the parameter (with dots) -> state of `inner`, whose arrays have the leading axes of
    the parameter; counters are shared. Layers are updated one after another, so that temporary arrays of `inner` exist
    for one layer and not for all.
    """

    def leaves(tree: Any) -> list[tuple[str, int, Any]]:
        """Returns key in the state, number of axes of layers and experts, and array of every parameter."""
        found = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = path_name(path)
            found.append((name.replace("/", "."), max(0, leaf.ndim - (2 if _is_matrix(name) else 1)), leaf))
        return found

    def init(params: Any) -> dict[str, Any]:
        return {key: _init_each(inner, axes, leaf) for key, axes, leaf in leaves(params)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new_updates, new_state = [], {}
        for (key, axes, grad), value in zip(leaves(updates), jax.tree.leaves(params), strict=True):
            made, new_state[key] = _update_each(inner.update, axes, grad, state[key], value)
            new_updates.append(made)
        return jax.tree.unflatten(jax.tree.structure(updates), new_updates), new_state

    return optax.GradientTransformation(init, update)


def _init_each(inner: optax.GradientTransformation, axes: int, value: jax.Array) -> Any:
    """Maps `inner.init` over this many leading axes."""
    state, make = jax.eval_shape(inner.init, jax.ShapeDtypeStruct(value.shape[axes:], value.dtype)), inner.init
    for _ in range(axes):
        make = jax.vmap(make, out_axes=_batched(state))
    return make(value)


def _update_each(inner: Callable, axes: int, grad: jax.Array, state: Any, value: jax.Array) -> tuple[jax.Array, Any]:
    """Maps `inner.update` over this many leading axes: the first one in a loop, the others at once."""
    if axes == 0:
        return inner(grad, state, value)
    where, call = _batched(state), inner
    for _ in range(axes - 1):
        call = jax.vmap(call, in_axes=(0, where, 0), out_axes=(0, where))
    leaves, structure = jax.tree.flatten(state)
    mapped = [leaf for leaf in leaves if leaf.ndim]

    def one(layer: tuple) -> tuple[jax.Array, list[jax.Array]]:
        grad, arrays, value = layer
        rest = iter(arrays)
        own = jax.tree.unflatten(structure, [next(rest) if leaf.ndim else leaf for leaf in leaves])
        made, new = call(grad, own, value)
        return made, jax.tree.leaves(new)

    made, new = jax.lax.map(one, (grad, mapped, value))
    # Counters are equal for all layers: one is kept.
    shared = [one if old.ndim else one[0] for one, old in zip(new, leaves, strict=True)]
    return made, jax.tree.unflatten(structure, shared)


def _batched(state: Any) -> Any:
    """Returns the axes for `vmap`: arrays are mapped over, counters are not."""
    return jax.tree.map(lambda leaf: 0 if jnp.ndim(leaf) else None, state)


def at_step(opt_state: optax.OptState, step: jax.Array) -> optax.OptState:
    """Returns a new state of an optimizer, with the schedule of its learning rate as after `step` steps."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    new = optax.ScaleByScheduleState(count=step)
    return jax.tree.map(lambda node: new if is_schedule(node) else node, opt_state, is_leaf=is_schedule)


class Placed(NamedTuple):
    """Shape of a parameter, and how it is split."""

    shape: tuple[int, ...]
    spec: P


def state_specs(opt_state: optax.OptState, params: Mapping[str, Placed]) -> Any:
    """Returns the tree of an optimizer's state (arrays or ShapeDtypeStructs) with a PartitionSpec for every leaf.

    An array of a parameter's shape gets the spec of the parameter in `params`, which are by path in memory; an array
    that lacks one of the axes of its matrix (the factors of Adafactor's second moment) gets the spec of the others;
    small ones, such as counters and constants of a matrix, are replicated.
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
    without = [(*range(axis), *range(axis + 1, ndim)) for axis in range(max(0, ndim - 2), ndim)]
    fitting = [kept for kept in without if tuple(param.shape[axis] for axis in kept) == shape]
    if not fitting:
        return P()
    # Both fit a square matrix. Optax then takes the means of rows along the last axis.
    return P(*(axes[axis] for axis in fitting[0 if is_column else -1]))
