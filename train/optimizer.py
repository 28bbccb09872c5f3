"""AdamW with warm-up, clipping and a weight-decay mask (Optax)."""

import re

import jax
import jax.numpy as jnp
import optax

from moe_jax.sharding import path_name
from moe_jax.train.recipe import OptimizerSection, ScheduleSection


def learning_rate(section: OptimizerSection, schedule: ScheduleSection, steps: int) -> optax.Schedule:
    """Learning rate by number of steps done: linear warm-up from 0, then decay to `final_ratio` at `steps`.

    The first step uses the first value of the warm-up above 0, and the last step uses the final value.
    """
    peak = section.learning_rate
    rest = max(1, steps - schedule.warmup_steps)
    if schedule.kind == "cosine":
        decay = optax.cosine_decay_schedule(peak, rest, alpha=schedule.final_ratio)
    elif schedule.kind == "linear":
        decay = optax.linear_schedule(peak, peak * schedule.final_ratio, rest)
    else:
        decay = optax.constant_schedule(peak)
    if schedule.warmup_steps:
        warmup = optax.linear_schedule(0.0, peak, schedule.warmup_steps)
        decay = optax.join_schedules([warmup, decay], [schedule.warmup_steps])
    # With a decay to 0, rounding would make the last rate slightly negative.
    return lambda done: jnp.maximum(decay(done + 1), 0.0)


def make_optimizer(section: OptimizerSection, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW. Gradients and moments are float32 whatever the parameters are.

    `init` and `update` take states of trained parameters only (see `peft.split_model`).
    """

    def decays(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: is_decayed(path_name(path), section), params)

    adamw = optax.adamw(
        schedule, b1=section.b1, b2=section.b2, eps=section.eps, weight_decay=section.weight_decay, mask=decays
    )
    clip = optax.clip_by_global_norm(section.clip_norm) if section.clip_norm else optax.identity()
    return in_float32(optax.chain(clip, adamw))


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs a transformation on float32 copies, so that bfloat16 parameters do not get bfloat16 moments."""

    def cast(tree):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def init(params):
        return inner.init(cast(params))

    def update(updates, state, params=None):
        return inner.update(cast(updates), state, cast(params))

    return optax.GradientTransformation(init, update)


def is_decayed(path: str, section: OptimizerSection) -> bool:
    """Whether weight decay applies to the parameter at `path`: not to norms and biases."""
    if re.search(r"/(scale|bias)$", path):
        return False
    if re.search(r"(^|/)embed/", path):
        return section.decay_embeddings
    if "/router/" in path:
        return section.decay_router
    return True
