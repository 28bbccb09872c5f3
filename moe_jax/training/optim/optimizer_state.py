"""Shardings of an optimizer's state: moments are split like their parameters, their factors like the remaining axes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec as P

from moe_jax.distributed.sharding import path_name


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
