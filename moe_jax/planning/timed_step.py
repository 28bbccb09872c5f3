"""The time of a training step as it is measured here: of its products and copies alone, or of whole steps."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.core.data_sheets import available_memory
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import count_bytes
from moe_jax.distributed.sharding import path_name
from moe_jax.models import ModelConfig
from moe_jax.models.segments import segments_of
from moe_jax.planning.step_time import Rates
from moe_jax.training.program import Program, abstract_batch, first_state, make_program
from moe_jax.training.recipe import Recipe

# Enough to fill the caches of a CPU several times, and small beside any training run.
_COPIED = 64 << 20
_ROWS = 1024


def measured_rates(config: ModelConfig, compute_dtype: str, device: Any) -> Rates:
    """Measures rates of this machine: a product as wide as the model's, and a copy; takes a second or less."""
    with jax.default_device(device):
        width = max(config.d_model, 256)
        rows, kernel = jnp.ones((_ROWS, width), compute_dtype), jnp.ones((width, 4 * width), compute_dtype)
        product = jax.jit(lambda rows, kernel: rows @ kernel)
        copied = jnp.ones(_COPIED // 4, jnp.float32)
        operations = 2 * _ROWS * width * 4 * width / _seconds(lambda: product(rows, kernel))
        bandwidth = 2 * _COPIED / _seconds(lambda: jax.jit(jnp.negative)(copied))
    source = f"measured here just now: a product of {_ROWS} x {width} x {4 * width}, and a copy of {_COPIED >> 20} MiB"
    return Rates(operations=operations, bytes=bandwidth, source=source, overlap=False)


def _seconds(run: Callable[[], Any]) -> float:
    """Returns the median of five runs after the first, which compiles."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[2]


# Repeats of a segment in the shallow model, and in the deeper one that gives the time of a repeat. Two repeats are
# stacked and scanned, as more are.
_SHALLOW, _DEEPER = 2, 8
_ROUNDS = 8  # at most
_MOST_SECONDS = 10.0  # of the steps that count
# A step holds less than this times what it reads and updates; if that is more than the free memory, it is not tried.
_HELD = 3


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """The measured time of a step of the whole model, and the numbers of layers of the models that were run."""

    seconds: float
    layers: tuple[int, ...]

    def source(self, num_layers: int) -> str:
        """Returns a sentence on how the time of a model with this many layers is known."""
        if self.layers == (num_layers,):
            return "measured here just now, on the model with random weights"
        *first, last = map(str, self.layers)
        counts = f"{', '.join(first)} and {last}" if first else last
        return f"measured here just now, on models of {counts} of the {num_layers} layers with random weights"


def timed_step(
    recipe: Recipe, config: ModelConfig, devices: list[Any], teacher: ModelConfig | None = None
) -> TimedStep | None:
    """Runs some steps, with random weights and tokens; takes seconds, most of them to compile.

    A teacher has all its layers beside each of the models that are run, so that its time counts once. Returns None if
    even a model of few layers may not find room in the memory that is free, or lacks the layers that the recipe names.
    """
    segments = segments_of(config.layers)
    shallow = [min(segment.repeats, _SHALLOW) for segment in segments]
    deeper = [shallow[:i] + [min(segment.repeats, _DEEPER)] + shallow[i + 1 :] for i, segment in enumerate(segments)]
    # Multiples of the difference between a deeper model and the shallow one that are missing.
    lacking = {
        i: (segment.repeats - shallow[i]) / (deeper[i][i] - shallow[i])
        for i, segment in enumerate(segments)
        if segment.repeats > shallow[i]
    }
    models = [_with_repeats(config, repeats) for repeats in (*(deeper[index] for index in lacking), shallow)]
    try:
        programs = [make_program(recipe, model, devices, teacher=teacher) for model in models]
    except InputError:
        return None
    leaves = jax.tree.leaves([(program.state, program.frozen, program.arguments) for program in programs])
    free = available_memory()
    if free is not None and _HELD * count_bytes(leaves) > free:
        return None
    found = []
    for *times, least in _rounds(programs, recipe):
        found.append(least + sum(max(0.0, more - least) * lacking[i] for more, i in zip(times, lacking, strict=True)))
    return TimedStep(statistics.median(found), tuple(sorted(model.num_layers for model in models)))


def _with_repeats(config: ModelConfig, repeats: list[int]) -> ModelConfig:
    """Returns the model with this many repeats of each of its segments."""
    layers, encoder = [], 0
    for segment, count in zip(segments_of(config.layers), repeats, strict=True):
        layers += [*segment.pattern] * count
        if segment.start < config.num_encoder_layers:
            encoder = len(layers)
    return dataclasses.replace(config, layers=tuple(layers), num_encoder_layers=encoder)


def _rounds(programs: list[Program], recipe: Recipe) -> list[list[float]]:
    """Returns seconds of a step of each program, several times, after one that is compiled.

    The programs take turns: a disturbance by other work of the machine would be multiplied if it affected only one of
    them. In each turn the first step does not count: after another program, memory has to be allocated by the system
    again.
    """
    steps = [_stepping(program, recipe) for program in programs]
    for step in steps:
        step()
    rounds: list[list[float]] = []
    while len(rounds) < _ROUNDS and sum(map(sum, rounds)) < _MOST_SECONDS:
        rounds.append([(step(), step())[1] for step in steps])
    return rounds


def _stepping(program: Program, recipe: Recipe) -> Callable[[], float]:
    """Returns a function that runs one step after another, and returns the seconds of each."""
    with jax.set_mesh(program.mesh):
        params, frozen, teacher = _drawn((program.state.params, program.frozen, program.arguments))
        state, batch = first_state(program, params), _batch(recipe, program)

    def step() -> float:
        nonlocal state
        start = time.perf_counter()
        with jax.set_mesh(program.mesh):
            state, metrics = program.step(state, frozen, batch, *teacher)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - start

    return step


def _drawn(tree: Any) -> Any:
    """Returns arrays in place of abstract ones: small numbers, and scales of 1, as a model has them.

    Numbers too small for the usual format (subnormal) would slow a processor down many times.
    """
    random = np.random.default_rng(0)

    def one(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = np.zeros(leaf.shape, np.float32)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            values = random.uniform(-0.03, 0.03, leaf.shape).astype(np.float32)
        if path_name(path).endswith("norm/scale"):
            values = np.ones(leaf.shape, np.float32)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(one, tree)


def _batch(recipe: Recipe, program: Program) -> dict[str, jax.Array]:
    """Returns a full batch of tokens that are scored."""
    random = np.random.default_rng(0)

    def one(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if name in ("tokens", "targets", "inputs"):
            values = random.integers(0, program.config.vocab_size, leaf.shape)
        elif name == "positions":
            values = np.broadcast_to(np.arange(leaf.shape[1]), leaf.shape)
        else:
            values = np.full(leaf.shape, 0 if name == "cut" else 1)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    like = abstract_batch(recipe, program.config, program.mesh)
    return {name: one(name, leaf) for name, leaf in like.items()}
