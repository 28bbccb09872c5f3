"""Learning rate and weight decay of every parameter: from the optimizer, or from the group that it belongs to."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moe_jax.core.errors import clipped, nearest, raise_if_any, shown
from moe_jax.distributed.sharding import path_name
from moe_jax.peft.partition import full_matches
from moe_jax.training.recipe import OptimizerSection

PerLayer = float | tuple[float, ...]


class Rates(NamedTuple):
    """Rates of a parameter in memory; if they differ between the layers stacked in it, one number for each.

    Attributes:
      factor: its learning rate, relative to that of the optimizer.
      decay: its weight decay.
    """

    factor: PerLayer
    decay: PerLayer


def group_rates(section: OptimizerSection, leaves: Mapping[str, Sequence[str]]) -> dict[str, Rates]:
    """Returns the rates of trained parameters.

    Args:
      section: of the recipe; if several groups name a parameter, the first one counts.
      leaves: path of a parameter in memory -> its leaf paths, one for each layer stacked in it.

    Returns:
      Path in memory -> rates.

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
        if own is None or is_never_decayed(path):
            return section.weight_decay if is_decayed(path, section) else 0.0
        return own

    return {
        path: Rates(_merged([factor(leaf) for leaf in names]), _merged([decay(path, leaf) for leaf in names]))
        for path, names in leaves.items()
    }


def ungrouped(section: OptimizerSection, path: str) -> Rates:
    """Returns the rates of the parameter at a path in memory if the recipe has no groups."""
    return Rates(1.0, section.weight_decay if is_decayed(path, section) else 0.0)


def is_decayed(path: str, section: OptimizerSection) -> bool:
    """Whether weight decay applies to the parameter at `path`: not to norms and biases."""
    if is_never_decayed(path):
        return False
    if re.search(r"(^|/)embed/", path):
        return section.decay_embeddings
    if "/router/" in path:
        return section.decay_router
    return True


def is_never_decayed(path: str) -> bool:
    """Whether the parameter at `path` belongs to a norm, or is a bias."""
    return re.search(r"/(scale|bias)$", path) is not None


def apply_rates(section: OptimizerSection, rates: Mapping[str, Rates] | None) -> optax.GradientTransformation:
    """Adds its decay to the update of every parameter, and multiplies both by the factor of its learning rate.

    Args:
      section: of the recipe.
      rates: from `group_rates`; None: the recipe has no groups.
    """

    def one(path: tuple, update: jax.Array, value: jax.Array) -> jax.Array:
        name = path_name(path)
        factor, decay = ungrouped(section, name) if rates is None else rates[name]
        if decay:
            update = update + _shaped(decay, value) * value
        return update if factor == 1.0 else _shaped(factor, value) * update

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(one, updates, params))


def _merged(numbers: Sequence[float]) -> PerLayer:
    return numbers[0] if len(set(numbers)) == 1 else tuple(numbers)


def _shaped(number: PerLayer, like: jax.Array) -> float | jax.Array:
    """Returns the number, or the numbers of the layers along the first axis."""
    if not isinstance(number, tuple):
        return number
    return jnp.asarray(np.array(number, np.float32).reshape(-1, *(1,) * (like.ndim - 1)), like.dtype)
