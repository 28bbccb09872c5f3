"""The least time of a compiled step on every chip of a slice, by data sheets: an estimate that no program reaches.

A step takes at least as long as its matrix products at the peak of the matrix units, as the bytes that it has to move
between the chip and its memory, and as its transfers to other chips. If all three overlap perfectly, the longest of
them is the time. None of them includes waiting, or work of other units.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from moe_jax.core.data_sheets import Chip
from moe_jax.planning.hlo import Transfer
from moe_jax.training.program import Program
from moe_jax.training.recipe import Recipe


class StepRoofline(NamedTuple):
    """An estimate for one chip.

    Attributes:
      matrix: seconds of the products, with those that `remat` does again.
      memory: seconds for the bytes that are moved to and from its memory.
      links: seconds for the bytes that it sends; None: the links of the chip are unknown.
      seconds: the longest of them.
      bound: the name of the longest.
      utilisation: share of the peak that the model's own operations would reach in this time.
    """

    matrix: float
    memory: float
    links: float | None
    seconds: float
    bound: str
    utilisation: float


class StateNumbers(NamedTuple):
    """Parameters and optimizer state that a chip reads and writes in a step.

    Attributes:
      used: number of all parameters, those that other chips keep a part of (`fsdp`, `sequence`) as a whole.
      changed: bytes that a step changes: trained parameters, the optimizer's state and a moving average.
      trained: number of the trained parameters.
    """

    used: int
    changed: int
    trained: int

    @classmethod
    def of(cls, program: Program) -> "StateNumbers":
        """Returns the numbers of a program on its mesh."""
        parameters = jax.tree.leaves((program.state.params, program.frozen))
        changed = jax.tree.leaves((program.state.params, program.state.opt_state, program.state.ema))
        return cls(
            used=sum(_shard(leaf, gathered=("fsdp", "sequence")) for leaf in parameters),
            changed=sum(_shard(leaf) * np.dtype(leaf.dtype).itemsize for leaf in changed),
            trained=sum(_shard(leaf) for leaf in jax.tree.leaves(program.state.params)),
        )


def step_roofline(
    recipe: Recipe,
    chip: Chip,
    model_flops: float,
    state: StateNumbers,
    temporaries: int,
    sent: Iterable[Transfer],
    devices: int,
    per_host: int | None,
) -> StepRoofline:
    """Estimates a step.

    Parameters are read in the dtype of the products, forward, backward, and once more where a layer is computed again,
    by every microbatch. What a step changes, and the gradients, are read and written once.

    Args:
      recipe: of the run.
      chip: of the mesh.
      model_flops: operations of a chip in a step, without those done again.
      state: parameters and optimizer state that the step reads and writes.
      temporaries: bytes that a step holds temporarily; they are written once and read once.
      sent: the collectives of the step.
      devices: number of devices of the mesh.
      per_host: devices of a host, which reach others over the network; None: all are in one slice.
    """  # fmt: skip
    itemsize = np.dtype(recipe.model.compute_dtype).itemsize
    peak = chip.operations_per_second(itemsize)
    again = recipe.model.remat == "full"
    matrix = model_flops * (8 / 6 if again else 1) / peak
    passes = recipe.train.accumulation * (3 if again else 2)
    moved = passes * state.used * itemsize + 2 * (state.changed + 4 * state.trained)
    memory = (moved + 2 * temporaries) / chip.bandwidth
    links = None
    if chip.link:
        links = sum(one.count * sending_seconds(one, chip, devices, per_host) for one in sent)
    parts = {"matrix units": matrix, "memory": memory} | ({} if links is None else {"links": links})
    bound = max(parts, key=lambda name: parts[name])
    seconds = parts[bound]
    return StepRoofline(matrix, memory, links, seconds, bound, model_flops / peak / seconds)


def sending_seconds(one: Transfer, chip: Chip, devices: int, per_host: int | None) -> float:
    """Returns the seconds of a collective, over the links of one axis of the slice, or the network between hosts.

    If n devices gather or scatter an array, each sends (n - 1) / n of it; an all-reduce does both. Rows of an
    all-to-all are assumed to be spread evenly.
    """
    group = one.group or tuple(range(devices))
    if len(group) < 2:
        return 0.0
    share = 1.0 if one.kind == "collective-permute" else (len(group) - 1) / len(group)
    passes = 2 if one.kind == "all-reduce" else 1
    leaves = per_host is not None and len({device // per_host for device in group}) > 1
    return passes * share * one.bytes / (chip.network if leaves else chip.link)


def _shard(leaf: jax.ShapeDtypeStruct, gathered: tuple[str, ...] = ()) -> int:
    """Returns the entries of a leaf on a device, or those it has when it is gathered over the axes `gathered`."""
    assert isinstance(leaf.sharding, NamedSharding)
    size = math.prod(leaf.sharding.shard_shape(leaf.shape))
    axes = [axis for part in leaf.sharding.spec for axis in (part if isinstance(part, tuple) else (part,))]
    return size * math.prod(leaf.sharding.mesh.shape[axis] for axis in gathered if axis in axes)
