"""Plans training by a recipe: the bytes and seconds that it will take on every device; for `plan --train`.

The arrays that a run holds all the time are counted on the real state, made by `eval_shape`. The temporary memory of a
step is read from the compiled step; without a compiler for the device, it is the bytes that JAX keeps for the backward
pass, and an estimate.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from moe_jax.core.data_sheets import Chip, resident_memory, total_memory
from moe_jax.core.errors import InputError
from moe_jax.data.sections import DataSection
from moe_jax.distributed.sharding import check_batch_divides, check_sequence_divides, mesh_sizes, path_name
from moe_jax.experts.devices import spec_on_mesh
from moe_jax.model_io.frozen_tower import bytes_of_frozen_tower
from moe_jax.models import ModelConfig
from moe_jax.planning.compile_only import DoesNotFit, bytes_of, compiled_step, is_tight
from moe_jax.planning.expected_step import PlacedLeaf, WholeStep, expected_step, placed_leaves, whole_step
from moe_jax.planning.frozen_gradients import frozen_gradients
from moe_jax.planning.hlo import sums_by_kind
from moe_jax.planning.model_costs import TOKENS
from moe_jax.planning.planned_devices import PlannedDevices, planned_devices
from moe_jax.planning.step_time import (
    HeldBytes,
    StepRoofline,
    StepTime,
    optimizer_operations,
    rates_of_chip,
    sent_bytes,
    step_time,
)
from moe_jax.planning.timed_step import measured_rates, timed_step
from moe_jax.training.program import Program, abstract_batch, make_program
from moe_jax.training.recipe import CheckpointSection, MeshSection, ModelSection, OptimizerSection, Recipe, TrainSection

USUAL_PROGRAM = 100 << 20
"""Bytes of a compiled step, where it is not compiled; in those of `benchmarks/pods.py` they are 50 to 110 MiB."""


@dataclasses.dataclass(frozen=True)
class MemoryItem:
    """Bytes on every device, or on a CPU of the process: what they are, and in `note` how the number is known."""

    name: str
    bytes: int
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sent:
    """Runs of the collectives of one kind in a step, bytes of the whole arrays in all (`hlo.Collectives`), and bytes
    that a device sends in them (`step_time.sent_bytes`)."""

    runs: int
    bytes: int
    sent: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """The memory and time that a run will take.

    Attributes:
      platform: such as `v5e:4x4`, or the kind of this machine's devices.
      devices: number of devices of the mesh.
      mesh: its axes.
      items: the contents of the memory of every device while it computes a step; on a CPU of the process's memory.
      total: the sum of the items.
      memory: of a device; on a CPU of the machine. None: unknown.
      is_compiled: whether the step was compiled for the device; if not, `items` has estimates.
      fits: whether the total is at most the memory, and the compiler finds room; None: the memory is unknown.
      tight: whether it is more than nine tenths of the memory.
      time: of a step; None: the rates of the device are unknown.
      is_least: whether no step can be faster (by a data sheet), or the time is an estimate (from what was measured).
      rates: where the time or its rates come from.
      steps: of the run.
      run_seconds: of all steps, without compiling, evaluation and checkpoints; where the step was not compiled, with
        transfers.
      run_tokens: of all steps, with every row of a batch full; None: the time is unknown.
      speeds: peaks of the device by its data sheet, per second: operations of `products`, bytes of the `memory`, of its
        `links`, and of the `network` between hosts; None: there is no data sheet. What is not known is left out.
      sent: collectives of a step by kind, on every device; None: the step was compiled, and `train --compile-only`
        shows them.
      model_flops: operations of a device in a step, without those done again and the gradients of frozen kernels; None
        as above.
      roofline: the least time, transfers included, by a data sheet; None as above.
    """

    platform: str
    devices: int
    mesh: dict[str, int]
    items: tuple[MemoryItem, ...]
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
    run_tokens: int | None = None
    speeds: dict[str, float] | None = None
    sent: dict[str, Sent] | None = None
    model_flops: float | None = None
    roofline: StepRoofline | None = None


def planned_training(
    recipe: Recipe,
    config: ModelConfig,
    platform: str | None = None,
    *,
    compiles: bool = True,
    pictures: int = 0,
    teacher: ModelConfig | None = None,
) -> PlannedTraining:
    """Predicts what a run will take. No weights and no data are read, and nothing is written.

    Args:
      platform: see `planned_devices`.
      compiles: whether the step is compiled, if there is a compiler for the platform. If not, its memory is estimated
        from shapes (`expected_step`), which takes seconds for any mesh. For a CPU it is always compiled.
      pictures: number of pictures in every row, if the step is compiled.
      teacher: config of the model that the recipe's `distill` names, if it does. Its parameters are counted, and if the
        step is compiled also its forward pass; estimates from shapes, collectives and the roofline are without that.

    Raises:
      InputError: an unknown platform, or a recipe that does not fit the model or the devices.
    """
    target = planned_devices(recipe.mesh, platform, compiles=compiles)
    if target.devices is not None:
        return _planned_by_compiling(recipe, config, target, pictures, teacher)
    if pictures:
        raise InputError("pictures are counted where the step is compiled; name a platform that has a compiler here")
    return RunInShapes(recipe, config, teacher).planned(recipe, target)


def assumed_recipe(
    config: ModelConfig, mesh: MeshSection, optimizer: Literal["adamw", "adafactor", "lion", "muon"], tokens: int | None
) -> Recipe:
    """Returns a recipe for training a model on a mesh, if there is none yet: in bfloat16, with full rematerialisation.

    `mesh` is without -1. A batch has so many `tokens` on every device, by default 8192, in rows of the model's context
    length or shorter; raises `InputError` for fewer than 1.
    """
    tokens = TOKENS if tokens is None else tokens
    if tokens < 1:
        raise InputError(f"--tokens {tokens} must be at least 1")
    in_row = tokens * mesh.sequence
    seq_len = min(config.max_positions, in_row)
    rows = mesh.data * mesh.fsdp * mesh.expert * max(1, in_row // seq_len)
    return Recipe(
        run_dir="run",
        model=ModelSection(config="config.json", init="random", compute_dtype="bfloat16", remat="full"),
        data=DataSection(seq_len=seq_len),
        optimizer=OptimizerSection(kind=optimizer),
        train=TrainSection(steps=1, batch_size=rows),
        mesh=mesh,
        checkpoint=CheckpointSection(every=1),
    )


TEACHER_ITEM = "parameters, teacher"
"""Name of the item that exists if there is a teacher."""
_ACTIVATIONS = "activations"


def _planned_by_compiling(
    recipe: Recipe, config: ModelConfig, target: PlannedDevices, pictures: int, teacher: ModelConfig | None
) -> PlannedTraining:
    features = pictures > 0 and recipe.data.feature_cache is not None
    program = make_program(recipe, config, target.devices, pictures=pictures, features=features, teacher=teacher)
    held = _held_bytes(program, recipe, dict(program.mesh.shape))
    items, fits = _held_items(held, recipe, program, target.count), True
    try:
        sizes = bytes_of(compiled_step(program, recipe))
        items += _temporary_items(held, sizes["temporaries"])
        padding = sizes["arguments"] - held.total
        if padding > 0:
            items.append(MemoryItem("padding", padding, "of the above, as arrays lie in this memory"))
        items.append(MemoryItem("results", sizes["outputs"] - sizes["aliased"], "metrics of the step"))
        if sizes["code"]:
            items.append(MemoryItem("program", sizes["code"], "the compiled step"))
    except DoesNotFit as error:
        fits = False
        note = "the compiler says no more than that there is too little room"
        temporaries = held.gradients if error.used is None else max(0, error.used - held.total)
        items += _temporary_items(held, temporaries, note)
    activations = next(item.bytes for item in items if item.name == _ACTIVATIONS)
    apart = []
    if features:
        assert target.devices is not None
        dtypes = {"param_dtype": recipe.model.frozen_dtype, "compute_dtype": recipe.model.compute_dtype}
        size = bytes_of_frozen_tower(config, **dtypes, device=target.devices[0])
        note = "apart from the step, on one device of a process, for pictures whose features are not kept yet"
        apart.append(MemoryItem("image encoder", size, note))
    if target.is_cpu:
        if recipe.train.steps > recipe.checkpoint.every:
            # Buffers that are read cannot be donated to the step, whose results then lie in new ones; and the writer
            # makes a copy of its own. For accelerators this is memory of their host.
            note = "the state before, which is written while the next step runs, and the writer's copy of it"
            items.append(MemoryItem("checkpoint", 2 * held.changed, note))
        # All devices of a CPU are in one process.
        items = [dataclasses.replace(item, bytes=item.bytes * target.count) for item in items]
        # With the step compiled; the process that trains will have as much.
        if (resident := resident_memory()) is not None:
            note = "Python, its libraries and the compiled step, as measured here"
            items.append(MemoryItem("process", resident, note))
    return _planned(recipe, config, target, teacher, program, held, items + apart, activations, fits=fits)


class RunInShapes:
    """A run that is planned from shapes, on one mesh after another.

    Recipes that differ from the first in `mesh`, `model.remat` and `train.accumulation` alone have the same arrays.
    What no mesh changes is computed once.

    Raises `InputError` for a recipe that does not fit the model.
    """

    def __init__(self, recipe: Recipe, config: ModelConfig, teacher: ModelConfig | None = None):
        self._config, self._teacher = config, teacher
        self._programs: dict[str, Program] = {}
        self._whole: dict[tuple[str, int], WholeStep] = {}
        self._program = self._program_of(recipe)

    def _program_of(self, recipe: Recipe) -> Program:
        """Returns the program on one device."""
        if recipe.model.remat not in self._programs:
            one = dataclasses.replace(recipe, mesh=MeshSection(data=1, fsdp=1, expert=1, sequence=1, tensor=1))
            program = make_program(one, self._config, jax.devices("cpu")[:1], teacher=self._teacher)
            self._programs[recipe.model.remat] = program
        return self._programs[recipe.model.remat]

    def whole_step(self, recipe: Recipe) -> WholeStep:
        """Returns what no mesh changes of a step."""
        key = recipe.model.remat, recipe.train.accumulation
        if key not in self._whole:
            self._whole[key] = whole_step(recipe, self._config, self._program_of(recipe))
        return self._whole[key]

    def placed(self, recipe: Recipe, mesh: dict[str, int]) -> tuple[list[PlacedLeaf], HeldBytes]:
        """Returns the parameters and the bytes that a device holds all the time, on a mesh with axes of these sizes.

        Raises `InputError` for dimensions that their axes do not divide.
        """
        return placed_leaves(self._program, mesh), _held_bytes(self._program, recipe, mesh)

    def planned(self, recipe: Recipe, target: PlannedDevices) -> PlannedTraining:
        """Plans the run of a recipe on a platform; raises `InputError` for a mesh that does not fit."""
        assert target.chip is not None
        mesh, program, config = mesh_sizes(dataclasses.asdict(recipe.mesh), target.count), self._program, self._config
        check_batch_divides(mesh, recipe.train.batch_size, recipe.train.accumulation)
        check_sequence_divides(mesh, recipe.data.seq_len)
        config.check_whole_sequences(mesh["sequence"])
        leaves, held = self.placed(recipe, mesh)
        whole = self.whole_step(recipe)
        expected = expected_step(recipe, config, whole, leaves, mesh, target.chip, held.changed, target.per_host)
        why = f", for {target.missing} is not installed" if target.missing else ""
        without = "" if self._teacher is None else ", without what the teacher's forward pass holds"
        note = f"and what else a step holds; from shapes, not compiled{why}{without}"
        items = [*_held_items(held, recipe, program, target.count), *_temporary_items(held, expected.temporaries, note)]
        items.append(MemoryItem("program", USUAL_PROGRAM, "the compiled step; usually as much"))
        planned = _planned(recipe, config, target, self._teacher, program, held, items, expected.kept, fits=True)
        left = Counter[str]()
        for one in expected.sent:
            left[one.kind] += round(one.count * sent_bytes(one, target.count))
        sums = sums_by_kind(expected.sent).items()
        sent = {kind: Sent(runs=one.count, bytes=one.bytes, sent=left[kind]) for kind, one in sums}
        of_shapes = {"sent": sent, "model_flops": expected.model_flops, "roofline": expected.roofline}
        return dataclasses.replace(planned, **of_shapes, run_seconds=expected.roofline.seconds * recipe.train.steps)


def _planned(
    recipe: Recipe,
    config: ModelConfig,
    target: PlannedDevices,
    teacher: ModelConfig | None,
    program: Program,
    held: HeldBytes,
    items: list[MemoryItem],
    activations: int,
    *,
    fits: bool,
) -> PlannedTraining:
    total, rates, time, source = sum(item.bytes for item in items), None, None, None
    if target.is_cpu:
        assert target.devices is not None
        rates = measured_rates(config, recipe.model.compute_dtype, target.devices[0])
    elif target.chip is not None:
        rates = rates_of_chip(target.chip, recipe.model.compute_dtype)
    if rates is not None:
        trained = jax.tree_util.tree_leaves_with_path(program.state.params)
        shapes = {path_name(path): leaf.shape for path, leaf in trained}
        products, frozen = optimizer_operations(recipe.optimizer, shapes), frozen_gradients(recipe, config, shapes)
        # All devices of a CPU share its rates.
        devices = 1 if target.is_cpu else target.count
        seen = {"pictures": program.pictures, "tower": program.tower_use}
        time = step_time(recipe, config, held, activations, devices, rates, products, teacher, frozen, **seen)
        source = rates.source
        timed = None
        if target.is_cpu and target.devices and not program.pictures:
            timed = timed_step(recipe, config, target.devices, teacher)
        if timed is not None:
            tokens = time.tokens_per_second * time.seconds / timed.seconds
            measured = {"seconds": timed.seconds, "products": None, "bytes": None, "tokens_per_second": tokens}
            time, source = dataclasses.replace(time, **measured), timed.source(config.num_layers)
    memory = total_memory() if target.is_cpu else None if target.chip is None else target.chip.memory
    return PlannedTraining(
        platform=target.name,
        devices=target.count,
        mesh=mesh_sizes(dataclasses.asdict(recipe.mesh), target.count),
        items=tuple(items),
        total=total,
        memory=memory,
        is_compiled=target.devices is not None,
        fits=None if memory is None else fits and total <= memory,
        tight=memory is not None and is_tight(total, memory),
        time=time,
        is_least=rates is not None and rates.overlap,
        rates=source,
        steps=recipe.train.steps,
        run_seconds=None if time is None else time.seconds * recipe.train.steps,
        run_tokens=None if time is None else round(time.tokens_per_second * time.seconds) * recipe.train.steps,
        speeds=None if target.is_cpu or target.chip is None else _speeds(target.chip, recipe.model.compute_dtype),
    )


def _speeds(chip: Chip, dtype: str) -> dict[str, float]:
    speeds = {"memory": chip.bandwidth, "links": chip.link, "network": chip.network}
    speeds = {"products": chip.operations_per_second(jnp.dtype(dtype).itemsize), **speeds}
    return {name: speed for name, speed in speeds.items() if speed}


def _abstract_mesh(mesh: Mapping[str, int]) -> Any:
    return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))


def _held_bytes(program: Program, recipe: Recipe, mesh: dict[str, int]) -> HeldBytes:
    """Counts the arrays of a state, a batch and gradients on one device of a mesh with these axes."""
    abstract = _abstract_mesh(mesh)

    def shard(leaf: jax.ShapeDtypeStruct) -> int:
        assert isinstance(leaf.sharding, NamedSharding)
        try:
            spec = spec_on_mesh(leaf.sharding.spec, leaf.shape, mesh)
            return math.prod(NamedSharding(abstract, spec).shard_shape(leaf.shape))
        except ValueError as error:
            raise InputError(f"mesh {mesh}: {error}") from None

    def count(tree: Any) -> int:
        return sum(shard(leaf) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))

    state = program.state
    return HeldBytes(
        params=count(state.params),
        frozen=count(program.frozen),
        teacher=count(program.arguments),
        optimizer=count((state.opt_state, state.step)),
        average=count(state.ema),
        batch=count(
            abstract_batch(recipe, program.config, program.mesh, pictures=program.pictures, features=program.features)
        ),
        gradients=sum(4 * shard(leaf) for leaf in jax.tree.leaves(state.params)),
    )


def _held_items(held: HeldBytes, recipe: Recipe, program: Program, devices: int) -> list[MemoryItem]:
    section = recipe.optimizer
    moments = "float32" if section.moments == "float32" else f"first moments {section.moments}, the rest float32"
    rows = f"{recipe.train.batch_size} rows of {recipe.data.seq_len:,} tokens, over all devices"
    frozen = recipe.model.frozen_dtype or "as the model's config says"
    paths = (path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(program.frozen))
    if devices > 1 and any("/nf4/" in path for path in paths):
        frozen += "; of NF4 the codes are split, and the scales are whole on every device"
    items = (
        ("parameters, trained", held.params, recipe.model.param_dtype),
        ("parameters, frozen", held.frozen, frozen),
        (TEACHER_ITEM, held.teacher, "as its config says"),
        ("optimizer", held.optimizer, f"{section.kind}, {moments}"),
        ("moving average", held.average, "float32"),
        ("batch", held.batch, rows),
    )
    return [MemoryItem(*item) for item in items if item[1]]


def _temporary_items(held: HeldBytes, temporaries: int, note: str = "") -> list[MemoryItem]:
    """Returns the temporary memory of a step. XLA may reuse memory of gradients: they take no more than all of it."""
    gradients = min(held.gradients, temporaries)
    note = note or "and what else the compiled step holds meanwhile"
    return [MemoryItem("gradients", gradients, "float32"), MemoryItem(_ACTIVATIONS, temporaries - gradients, note)]
