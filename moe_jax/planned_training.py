"""What training by a recipe will take of every device, in bytes and seconds; for `plan --train`.

What a run holds all the time is counted on the real state, made by `eval_shape`. What a step holds meanwhile is what
the compiler says of that very step, compiled for the device; without a compiler for it, it is what JAX keeps for the
backward pass, and an estimate.
"""

import dataclasses
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from moe_jax.data_sheets import CHIPS, Chip, chip_of_kind
from moe_jax.errors import InputError, check_member, shown
from moe_jax.memory import resident_memory, total_memory
from moe_jax.models import ModelConfig
from moe_jax.sharding import AXES, path_name
from moe_jax.train import gpu_topology
from moe_jax.train.compile_only import (
    DoesNotFit,
    bytes_of,
    compiled_step,
    described_devices,
    has_tpu_compiler,
    is_tight,
)
from moe_jax.train.placement import batch_shards, check_batch_divides
from moe_jax.train.program import Program, abstract_batch, make_program
from moe_jax.train.recipe import MeshSection, Recipe
from moe_jax.train.step import make_loss
from moe_jax.train.step_time import StepBytes, StepTime, measured_rates, optimizer_operations, rates_of_chip, step_time
from moe_jax.train.timed_step import timed_step

# The smallest slices that the TPU compiler knows; a step for fewer chips uses some of them.
_SLICES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
_OF_SLICE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """Bytes on every device, or on a CPU of the process.

    Attributes:
      name: what they are.
      bytes: how many.
      note: how they are known.
    """

    name: str
    bytes: int
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """What a run will take.

    Attributes:
      platform: where, such as `v5e:4x4`, or the kind of this machine's devices.
      devices: of the mesh.
      mesh: its axes.
      items: what lies in the memory of every device while it computes a step; on a CPU in that of the process.
      total: the sum of the items.
      memory: of a device; on a CPU of the machine. None: not known.
      is_compiled: whether the step was compiled for the device; if not, `items` has estimates.
      fits: whether the total is at most the memory, and the compiler finds room; None: the memory is not known.
      tight: whether it is more than nine tenths of it.
      time: of a step; None: the rates of the device are not known.
      is_least: whether no step can be faster (by a data sheet), or the time is an estimate (from what was measured).
      rates: where the time or its rates come from.
      steps: of the run.
      run_seconds: of all steps, without compiling, evaluation and checkpoints.
    """

    platform: str
    devices: int
    mesh: dict[str, int]
    items: tuple[Item, ...]
    total: int
    memory: int | None
    is_compiled: bool
    fits: bool | None
    tight: bool
    time: StepTime | None
    is_least: bool
    rates: str | None
    steps: int
    run_seconds: float | None


class _Target(NamedTuple):
    """Devices to plan for.

    Attributes:
      name: as it is printed.
      devices: for the mesh; None: no compiler for them is here.
      count: how many.
      chip: in the table of data sheets; None: it is not there.
      missing: the compiler that is not here.
    """

    name: str
    devices: list[Any] | None
    count: int
    chip: Chip | None
    missing: str = ""


def planned_training(recipe: Recipe, config: ModelConfig, platform: str | None = None) -> PlannedTraining:
    """Foretells a run. No weights and no data are read, and nothing is written.

    Args:
      recipe: the run.
      config: of its model.
      platform: `cpu`, the name of a chip, or a topology such as `v5e:4x4` or `h100:2x8`. None: the devices of this
        machine. Of a chip there are as many as the recipe's mesh needs at least.

    Raises:
      InputError: an unknown platform, or a recipe that does not go with the model or the devices.
    """
    target = _target(recipe, platform)
    if target.devices is None:
        return _estimated(recipe, config, target)
    program = make_program(recipe, config, target.devices)
    exact = _held(program, recipe, dict(program.mesh.shape))
    used: int | None = None
    sizes: dict[str, int] = {}
    try:
        sizes = bytes_of(compiled_step(program, recipe))
        fits = True
    except DoesNotFit as error:
        used, fits = error.used, False
    is_cpu = target.devices[0].platform == "cpu"
    items = list(exact.items())
    held = exact.total
    if sizes:
        items += _working(exact, sizes["temporaries"])
        padding = sizes["arguments"] - held
        if padding > 0:
            items.append(Item(name="padding", bytes=padding, note="of the above, as arrays lie in this memory"))
        items.append(Item(name="results", bytes=sizes["outputs"] - sizes["aliased"], note="metrics of the step"))
        if sizes["code"]:
            items.append(Item(name="program", bytes=sizes["code"], note="the compiled step"))
    else:
        note = "the compiler says no more than that there is too little room"
        items += _working(exact, max(0, used - held) if used is not None else exact.gradients, note)
    if is_cpu:
        items += _checkpoint(exact, recipe)
        # All devices of a CPU are in one process.
        items = [dataclasses.replace(item, bytes=item.bytes * target.count) for item in items]
        items += _process()
    activations = next(item.bytes for item in items if item.name == _ACTIVATIONS) // (target.count if is_cpu else 1)
    memory = total_memory() if is_cpu else None if target.chip is None else target.chip.memory
    return _planned(recipe, config, target, items, memory, exact, activations, is_compiled=True, fits=fits)


_ACTIVATIONS = "activations"


class _Held(NamedTuple):
    """Bytes on every device that are known exactly.

    Attributes:
      params, frozen, optimizer, average, batch: as in the names of items.
      gradients: which are among what a step holds meanwhile.
      operations: of the optimizer's products, on all devices.
      notes: by attribute.
    """

    params: int
    frozen: int
    optimizer: int
    average: int
    batch: int
    gradients: int
    operations: float
    notes: dict[str, str]

    @property
    def total(self) -> int:
        """Of what is held all the time, with the batch."""
        return self.params + self.frozen + self.optimizer + self.average + self.batch

    def items(self) -> list[Item]:
        names = {
            "params": "parameters, trained",
            "frozen": "parameters, frozen",
            "optimizer": "optimizer",
            "average": "moving average",
            "batch": "batch",
        }
        return [
            Item(name=name, bytes=getattr(self, key), note=self.notes.get(key, ""))
            for key, name in names.items()
            if getattr(self, key)
        ]


def _held(program: Program, recipe: Recipe, mesh: dict[str, int]) -> _Held:
    """Counts the arrays of a state, a batch and gradients on one device of a mesh with these axes."""
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))

    def shard(leaf: jax.ShapeDtypeStruct) -> int:
        assert isinstance(leaf.sharding, NamedSharding)
        try:
            return math.prod(NamedSharding(abstract, leaf.sharding.spec).shard_shape(leaf.shape))
        except ValueError as error:
            raise InputError(f"mesh {mesh}: {error}") from None

    def count(tree: Any) -> int:
        return sum(shard(leaf) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))

    state = program.state
    section = recipe.optimizer
    moments = "float32" if section.moments == "float32" else f"first moments {section.moments}, the rest float32"
    return _Held(
        params=count(state.params),
        frozen=count(program.frozen),
        optimizer=count((state.opt_state, state.step)),
        average=count(state.ema),
        batch=count(abstract_batch(recipe, program.config, program.mesh)),
        gradients=sum(4 * shard(leaf) for leaf in jax.tree.leaves(state.params)),
        operations=optimizer_operations(
            section, {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}
        ),
        notes={
            "params": recipe.model.param_dtype,
            "frozen": recipe.model.frozen_dtype or "as the model's config says",
            "optimizer": f"{section.kind}, {moments}",
            "average": "float32",
            "batch": f"{recipe.train.batch_size} rows of {recipe.data.seq_len} tokens, over all devices",
        },
    )


def _working(exact: _Held, temporaries: int, note: str = "") -> list[Item]:
    """What a step holds meanwhile. XLA may reuse the memory of gradients, so that these take no more than all."""
    gradients = min(exact.gradients, temporaries)
    return [
        Item(name="gradients", bytes=gradients, note="float32"),
        Item(
            name=_ACTIVATIONS,
            bytes=temporaries - gradients,
            note=note or "and what else the compiled step holds meanwhile",
        ),
    ]


def _checkpoint(exact: _Held, recipe: Recipe) -> list[Item]:
    """What a step holds on a CPU while a checkpoint is written: buffers that are read cannot be donated to the step,
    whose results then lie in new ones; and the writer makes its own copy. Of accelerators it lies on their host."""
    if recipe.train.steps <= recipe.checkpoint.every:
        return []
    size = 2 * (exact.params + exact.optimizer + exact.average)
    note = "the state before, which is written while the next step runs, and the writer's copy of it"
    return [Item(name="checkpoint", bytes=size, note=note)]


def _process() -> list[Item]:
    """What this process has with the step compiled, which the process that trains will have as well."""
    resident = resident_memory()
    if resident is None:
        return []
    return [Item(name="process", bytes=resident, note="Python, its libraries and the compiled step, as measured here")]


def _estimated(recipe: Recipe, config: ModelConfig, target: _Target) -> PlannedTraining:
    """Without a compiler for the devices."""
    mesh = _mesh_sizes(recipe.mesh, target.count)
    one = dataclasses.replace(recipe, mesh=MeshSection(data=1, fsdp=1, expert=1, sequence=1, tensor=1))
    program = make_program(one, config, jax.devices("cpu")[:1])
    abstract: Any = AbstractMesh(tuple(mesh.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    check_batch_divides(abstract, recipe.train.batch_size, recipe.train.accumulation)
    exact = _held(program, recipe, mesh)
    parts_of_tokens = batch_shards(abstract) * abstract.shape["sequence"]
    activations = math.ceil(kept_bytes(program, one) / parts_of_tokens)
    items = [
        *exact.items(),
        Item(name="gradients", bytes=exact.gradients, note="float32"),
        Item(
            name=_ACTIVATIONS,
            bytes=activations,
            note=f"kept for the backward pass; estimated, for {target.missing} is not installed",
        ),
    ]
    memory = None if target.chip is None else target.chip.memory
    return _planned(recipe, config, target, items, memory, exact, activations, is_compiled=False, fits=True)


def kept_bytes(program: Program, recipe: Recipe) -> int:
    """Bytes that a microbatch keeps for its backward pass, as JAX traces it, without parameters and batch."""
    loss = make_loss(program.graphdef, program.config, accumulation=recipe.train.accumulation)
    rows = recipe.train.batch_size // recipe.train.accumulation
    micro = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, batch_size=rows, accumulation=1))

    def kept(params: nnx.State, frozen: nnx.State, batch: dict[str, jax.Array]) -> list[jax.Array]:
        key = jax.random.key(recipe.seed)
        _, vjp, _ = jax.vjp(lambda params: loss(params, frozen, batch, 1.0, key), params, has_aux=True)
        return jax.tree.leaves(vjp)

    with jax.set_mesh(program.mesh):
        batch = abstract_batch(micro, program.config, program.mesh)
        traced = jax.make_jaxpr(kept)(program.state.params, program.frozen, batch).jaxpr
    given = {id(var) for var in (*traced.invars, *traced.constvars)}
    found = {id(var): var.aval for var in traced.outvars if id(var) not in given}
    return sum(
        math.prod(getattr(aval, "shape", ())) * np.dtype(aval.dtype).itemsize
        for aval in found.values()
        if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    )


def _planned(
    recipe: Recipe,
    config: ModelConfig,
    target: _Target,
    items: list[Item],
    memory: int | None,
    exact: _Held,
    activations: int,
    *,
    is_compiled: bool,
    fits: bool,
) -> PlannedTraining:
    total = sum(item.bytes for item in items)
    moved = StepBytes(
        params=exact.params,
        frozen=exact.frozen,
        optimizer=exact.optimizer,
        average=exact.average,
        gradients=exact.gradients,
        activations=activations,
    )
    rates, time, source, is_least = None, None, None, False
    if target.devices is not None and target.devices[0].platform == "cpu":
        rates = measured_rates(config, recipe.model.compute_dtype, target.devices[0])
    elif target.chip is not None:
        rates, is_least = rates_of_chip(target.chip, recipe.model.compute_dtype), True
    if rates is not None:
        # The devices of a CPU share it.
        cpu = rates.overlap is False
        time = step_time(recipe, config, moved, 1 if cpu else target.count, rates, exact.operations)
        source = rates.source
        if cpu and target.devices is not None and (timed := timed_step(recipe, config, target.devices)) is not None:
            time, source = time.timed(timed.seconds), timed.source(config.num_layers)
    return PlannedTraining(
        platform=target.name,
        devices=target.count,
        mesh=_mesh_sizes(recipe.mesh, target.count),
        items=tuple(items),
        total=total,
        memory=memory,
        is_compiled=is_compiled,
        fits=None if memory is None else fits and total <= memory,
        tight=memory is not None and is_tight(total, memory),
        time=time,
        is_least=is_least,
        rates=source,
        steps=recipe.train.steps,
        run_seconds=None if time is None else time.seconds * recipe.train.steps,
    )


def _target(recipe: Recipe, platform: str | None) -> _Target:
    if platform in (None, "cpu"):
        devices = jax.devices() if platform is None else jax.devices("cpu")
        kind = devices[0].device_kind
        name = "this machine's CPU" if devices[0].platform == "cpu" else f"this machine: {kind}"
        return _Target(name, list(devices), len(devices), chip_of_kind(kind))
    assert platform is not None
    name, colon, shape = platform.partition(":")
    check_member("--platform", name, tuple(CHIPS))
    chip = CHIPS[name]
    if colon and (chip.platform == "cpu" or not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){0,2}", shape)):
        raise InputError(f"--platform {shown(platform)}: expected a topology such as v5e:4x4, v5p:2x2x4 or h100:2x8")
    least = math.prod(size for size in dataclasses.astuple(recipe.mesh) if size != -1)
    count = math.prod(int(size) for size in shape.split("x")) if colon else least
    if chip.platform == "gpu":
        if name not in gpu_topology.GPUS or not gpu_topology.has_plugin():
            return _Target(platform, None, count, chip, "XLA:GPU (moe-jax[gpu])")
        return _Target(platform, described_devices(platform if colon else f"{name}:{count}"), count, chip)
    if not has_tpu_compiler():
        return _Target(platform, None, count, chip, "the TPU compiler (moe-jax[tpu])")
    if colon:
        return _Target(platform, described_devices(platform), count, chip)
    if name not in _SLICES or count > _OF_SLICE:
        raise InputError(f"--platform {name}: the mesh needs {count} chips; name the slice, as in {name}:4x4 or 2x2x4")
    return _Target(platform, described_devices(_SLICES[name])[:count], count, chip)


def _mesh_sizes(section: MeshSection, count: int) -> dict[str, int]:
    """Axes of a mesh of so many devices; see `sharding.make_mesh`."""
    sizes = dataclasses.asdict(section)
    known = math.prod(size for size in sizes.values() if size != -1)
    sizes = {name: count // known if size == -1 else size for name, size in sizes.items()}
    if math.prod(sizes.values()) != count:
        raise InputError(f"mesh {dataclasses.asdict(section)} does not fit {count} devices")
    return sizes
