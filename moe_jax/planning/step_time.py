"""The least time of a training step by data sheets, which no program reaches, or its time at measured rates.

`step_roofline` takes the three times that a step takes at least, of its products at the peak of the matrix units, of
the bytes between a chip and its memory, and of its transfers to other chips; if they overlap perfectly, the longest
is the time. `step_time` counts products and bytes in more detail, without transfers; on a CPU, at the rates that
`timed_step` measures, it is an estimate for when whole steps find no room. Neither includes waiting, or work of other
units.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from moe_jax.core.data_sheets import Chip
from moe_jax.data.sections import input_length
from moe_jax.models import ModelConfig
from moe_jax.nn import has_auxiliary_loss
from moe_jax.planning.hlo import Transfer
from moe_jax.training.flops import TowerUse, batch_flops, picture_flops, train_flops_per_token
from moe_jax.training.optimizer import is_orthogonalised
from moe_jax.training.program import Program
from moe_jax.training.recipe import OptimizerSection, Recipe


class StepRoofline(NamedTuple):
    """An estimate for one chip.

    Attributes:
      matrix: seconds of the products, with those that `remat` does again.
      memory: seconds for the bytes that are moved to and from its memory.
      links: seconds for the bytes that it sends; None: the links of the chip are unknown.
      seconds, bound: the longest of them, and its name.
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
        trained, *more = program.state.params, program.state.opt_state, program.state.ema
        return cls(
            used=sum(_shard(leaf, ("fsdp", "sequence")) for leaf in jax.tree.leaves((trained, program.frozen))),
            changed=sum(_shard(leaf) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves((trained, more))),
            trained=sum(map(_shard, jax.tree.leaves(trained))),
        )


def counts_loads_first(recipe: Recipe, config: ModelConfig) -> bool:
    """Whether a step runs the model once more, forward: auxiliary losses need the loads of all microbatches first."""
    return recipe.train.accumulation > 1 and has_auxiliary_loss(config)


def step_roofline(
    recipe: Recipe,
    config: ModelConfig,
    chip: Chip,
    model_flops: float,
    state: StateNumbers,
    temporaries: int,
    sent: Iterable[Transfer],
    devices: int,
    per_host: int | None,
    frozen: float = 0.0,
) -> StepRoofline:
    """Estimates a step.

    Parameters are read in the dtype of the products, forward, backward, and once more where a layer is computed again
    or loads are counted first, by every microbatch. What a step changes, and the gradients, are read and written once;
    what it holds temporarily is written once and read once.

    Args:
      model_flops: operations of a chip in a step, without those done again, as if no kernel were frozen.
      frozen: of these, the gradients of frozen kernels (`frozen_gradients`), which are not computed.
      temporaries: bytes that a step holds temporarily.
      per_host: devices of a host, which reach others over the network; None: all are in one slice.
    """
    itemsize, again = np.dtype(recipe.model.compute_dtype).itemsize, recipe.model.remat == "full"
    peak = chip.operations_per_second(itemsize)
    more = again + counts_loads_first(recipe, config)  # forward runs, each two of the six parts of `model_flops`
    done = model_flops - frozen
    matrix = (done + model_flops * 2 * more / 6) / peak
    passes = recipe.train.accumulation * (2 + more)
    moved = passes * state.used * itemsize + 2 * (state.changed + 4 * state.trained)
    memory = (moved + 2 * temporaries) / chip.bandwidth
    links = sum(one.count * sending_seconds(one, chip, devices, per_host) for one in sent) if chip.link else None
    parts = {"matrix units": matrix, "memory": memory} | ({} if links is None else {"links": links})
    bound, seconds = max(parts.items(), key=lambda part: part[1])
    return StepRoofline(matrix, memory, links, seconds, bound, done / peak / seconds)


def sending_seconds(one: Transfer, chip: Chip, devices: int, per_host: int | None) -> float:
    """Returns the seconds of a collective, over the links of one axis of the slice, or the network between hosts."""
    group = one.group or tuple(range(devices))
    leaves = per_host is not None and len({device // per_host for device in group}) > 1
    return sent_bytes(one, devices) / (chip.network if leaves else chip.link)


def sent_bytes(one: Transfer, devices: int) -> float:
    """Returns the bytes that each device sends in a collective.

    If n devices gather or scatter an array, each sends (n - 1) / n of it, as in a ring; an all-reduce does both. Rows
    of an all-to-all are assumed to be spread evenly.
    """
    size = len(one.group) or devices
    share = 1.0 if one.kind == "collective-permute" and size > 1 else (size - 1) / size
    return (2 if one.kind == "all-reduce" else 1) * share * one.bytes


def _shard(leaf: jax.ShapeDtypeStruct, gathered: tuple[str, ...] = ()) -> int:
    """Returns the entries of a leaf on a device, or those it has when it is gathered over the axes `gathered`."""
    assert isinstance(leaf.sharding, NamedSharding)
    size = math.prod(leaf.sharding.shard_shape(leaf.shape))
    axes = [axis for part in leaf.sharding.spec for axis in (part if isinstance(part, tuple) else (part,))]
    return size * math.prod(leaf.sharding.mesh.shape[axis] for axis in gathered if axis in axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of a device, per second, and their source.

    `operations` are of matrix products in the recipe's dtype, `bytes` of its memory, read or written, and `overlap`
    says whether the memory is read while products are computed.
    """

    operations: float
    bytes: float
    source: str
    overlap: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """Bytes on one device that training holds; `gradients` are part of what a step holds temporarily."""

    params: int  # trained ones
    frozen: int
    optimizer: int
    average: int
    gradients: int
    teacher: int = 0
    batch: int = 0

    @property
    def changed(self) -> int:
        """Bytes that a step changes."""
        return self.params + self.optimizer + self.average

    @property
    def total(self) -> int:
        """Bytes that are held all the time, with the batch."""
        return self.changed + self.frozen + self.teacher + self.batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of one step on every device.

    Attributes:
      products, bytes: seconds of the matrix products and of the memory alone; None: steps were timed, not their parts.
      operations: floating-point operations of the products on one device, with those done again (`remat`).
      tokens_per_second: on all devices, with every row of a batch full.
    """

    seconds: float
    products: float | None
    bytes: float | None
    operations: float
    tokens_per_second: float


def step_time(
    recipe: Recipe,
    config: ModelConfig,
    held: HeldBytes,
    activations: int,
    devices: int,
    rates: Rates,
    optimizer: float = 0.0,
    teacher: ModelConfig | None = None,
    frozen: float = 0.0,
    pictures: int = 0,
    tower: TowerUse = "frozen",
) -> StepTime:
    """Estimates a step on `devices` that share the products, each with these rates.

    Weights are read by every microbatch forward and backward, and once more where a layer is computed again; the
    `activations` of a microbatch, in bytes, are written and read; gradients too; and the optimizer reads and writes all
    that it changes. `optimizer` is from `optimizer_operations`, `frozen` from `frozen_gradients`; a teacher only goes
    forward, as a `tower` that is frozen does, which sees the `pictures` of every row. So does the model, once more,
    where auxiliary losses need the loads of all microbatches first.
    """
    rows, seq_len, input_len = recipe.train.batch_size, recipe.data.seq_len, input_length(recipe.data)
    model = batch_flops(recipe, config) / devices
    again = recipe.model.remat == "full"
    weights = held.params + held.frozen
    # Of six parts two are forward, two the gradient of the input, and two that of the weights, if they are trained.
    loads_first = counts_loads_first(recipe, config)
    operations = model * (6 + 2 * again + 2 * loads_first) / 6 + (optimizer - frozen) / devices
    if teacher is not None:
        operations += rows * seq_len * train_flops_per_token(teacher, seq_len) / 3 / devices
    if pictures:
        operations += rows * pictures * picture_flops(config).of_step(tower) / devices
    products = operations / rates.operations
    microbatches = recipe.train.accumulation
    passes = microbatches * ((2 + again + loads_first) * weights + held.teacher + 2 * activations) / rates.bytes
    update = 2 * (held.changed + held.gradients) / rates.bytes
    # The optimizer waits for the last gradient.
    seconds = (max(products, passes) if rates.overlap else products + passes) + update
    tokens = rows * (seq_len + (input_len if config.has_encoder else 0))
    moved, speed = passes + update, tokens / seconds
    return StepTime(seconds=seconds, products=products, bytes=moved, operations=operations, tokens_per_second=speed)


def optimizer_operations(section: OptimizerSection, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Returns the operations of an optimizer's matrix products in a step: those that make Muon's updates orthogonal.

    Five times the product of `[m, n]`, m at most n, with its transpose, the square of that, and its product with the
    matrix (Newton-Schulz, as in `optax.contrib.muon`). `shapes` are those of the trained parameters, by path in memory.
    """
    if section.kind != "muon":
        return 0.0
    total = 0.0
    for *stacked, rows, columns in (shape for path, shape in shapes.items() if is_orthogonalised(path)):
        m, n = sorted((rows, columns))
        total += math.prod(stacked) * 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
    return total


def rates_of_chip(chip: Chip, compute_dtype: str) -> Rates:
    """Returns the peak rates of an accelerator's data sheet."""
    operations = chip.operations_per_second(jnp.dtype(compute_dtype).itemsize)
    return Rates(operations=operations, bytes=chip.bandwidth, source=chip.source, overlap=True)
