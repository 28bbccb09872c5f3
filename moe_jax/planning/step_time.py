"""The time of a training step: its operations and bytes, at the rates of a data sheet or of this machine.

No program reaches the rates of a data sheet, so on an accelerator this is the least time. On a CPU it is an estimate
from rates that are measured here, for when `timed_step` finds no room. Neither includes transfers between devices.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.core.data_sheets import Chip
from moe_jax.core.errors import InputError
from moe_jax.core.memory import available_memory
from moe_jax.data.sections import input_length
from moe_jax.distributed.sharding import path_name
from moe_jax.models import ModelConfig
from moe_jax.models.config import segments_of
from moe_jax.training.flops import step_flops, train_flops_per_token
from moe_jax.training.optim.optimizer import is_orthogonalised
from moe_jax.training.program import Program, abstract_batch, first_state, make_program
from moe_jax.training.recipe.schema import OptimizerSection, Recipe

# Enough to fill the caches of a CPU several times, and small beside any training run.
_COPIED = 64 << 20
_ROWS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of a device, per second.

    Attributes:
      operations: of matrix products in the recipe's dtype.
      bytes: of its memory, read or written.
      source: of these two numbers.
      overlap: whether the memory is read while products are computed.
    """

    operations: float
    bytes: float
    source: str
    overlap: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes on one device that a step moves from or to memory.

    Attributes:
      params: trained parameters.
      frozen: the other parameters.
      optimizer: its state.
      average: the moving average.
      gradients: float32.
      activations: that a microbatch leaves for its backward pass.
      teacher: parameters of a teacher.
    """

    params: int
    frozen: int
    optimizer: int
    average: int
    gradients: int
    activations: int
    teacher: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of one step on every device.

    Attributes:
      seconds: of the whole step.
      products: seconds of the matrix products alone; None: steps were timed, not their parts.
      bytes: seconds of the memory alone; None as above.
      operations: floating-point operations of the products on one device, with those done again (`remat`).
      tokens_per_second: on all devices, with every row of a batch full.
    """

    seconds: float
    products: float | None
    bytes: float | None
    operations: float
    tokens_per_second: float

    def timed(self, seconds: float) -> "StepTime":
        """Returns the same step with the seconds that were measured by running it."""
        tokens = self.tokens_per_second * self.seconds / seconds
        return dataclasses.replace(self, seconds=seconds, products=None, bytes=None, tokens_per_second=tokens)


def step_time(
    recipe: Recipe,
    config: ModelConfig,
    moved: StepBytes,
    devices: int,
    rates: Rates,
    optimizer: float = 0.0,
    teacher: ModelConfig | None = None,
) -> StepTime:
    """Estimates a step.

    Args:
      recipe, config: of the run.
      moved: bytes on one device.
      devices: that share the products.
      rates: of one device.
      optimizer: operations of the optimizer's own products, see `optimizer_operations`.
      teacher: config of a teacher, if there is one; it only goes forward.

    Weights are read by every microbatch forward and backward, and once more where a layer is computed again;
    activations are written and read; gradients too; and the optimizer reads and writes all that it changes.
    """
    rows, seq_len, input_len = recipe.train.batch_size, recipe.data.seq_len, input_length(recipe.data)
    model = step_flops(config, seq_len, input_len)(rows * seq_len, rows * input_len) / devices
    again = recipe.model.remat == "full"
    held = moved.params + moved.frozen
    trained = moved.params / held if held else 0.0
    # Of six parts two are forward, two the gradient of the input, and two that of the weights, if they are trained.
    operations = model * (4 + 2 * trained + (2 if again else 0)) / 6 + optimizer / devices
    if teacher is not None:
        operations += rows * seq_len * train_flops_per_token(teacher, seq_len) / 3 / devices
    products = operations / rates.operations
    microbatches = recipe.train.accumulation
    passes = microbatches * ((3 if again else 2) * held + moved.teacher + 2 * moved.activations) / rates.bytes
    update = 2 * (moved.params + moved.optimizer + moved.average + moved.gradients) / rates.bytes
    # The optimizer waits for the last gradient.
    seconds = (max(products, passes) if rates.overlap else products + passes) + update
    tokens = rows * (seq_len + (input_len if config.has_encoder else 0))
    return StepTime(
        seconds=seconds,
        products=products,
        bytes=passes + update,
        operations=operations,
        tokens_per_second=tokens / seconds,
    )


def optimizer_operations(section: OptimizerSection, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Returns the operations of an optimizer's matrix products in a step: those that make Muon's updates orthogonal.

    Five times the product of `[m, n]`, m at most n, with its transpose, the square of that, and its product with the
    matrix (Newton-Schulz, as in `optax.contrib.muon`).

    Args:
      section: of the recipe.
      shapes: of the trained parameters, by path in memory.
    """
    if section.kind != "muon":
        return 0.0
    total = 0.0
    for shape in (shape for path, shape in shapes.items() if is_orthogonalised(path)):
        *stacked, rows, columns = shape
        m, n = sorted((rows, columns))
        total += math.prod(stacked) * 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
    return total


def rates_of_chip(chip: Chip, compute_dtype: str) -> Rates:
    """Returns the peak rates of an accelerator's data sheet."""
    operations = chip.operations_per_second(jnp.dtype(compute_dtype).itemsize)
    return Rates(operations=operations, bytes=chip.bandwidth, source=chip.source, overlap=True)


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
    """The measured time of a step.

    Attributes:
      seconds: for the whole model.
      layers: numbers of layers of the models that were run.
    """

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

    Args:
      recipe: of the run.
      config: of its model.
      devices: for the mesh.
      teacher: config of the model that the recipe's `distill` names, if it does; it has all its layers beside each of
        the models that are run, so that its time counts once.

    Returns:
      None if even a model of few layers may not find room in the memory that is free, or lacks the layers that the
      recipe names.
    """
    segments = segments_of(config.layers)
    shallow = [min(segment.repeats, _SHALLOW) for segment in segments]
    deeper = [shallow[:i] + [min(segment.repeats, _DEEPER)] + shallow[i + 1 :] for i, segment in enumerate(segments)]
    # Multiples of the difference between a deeper model and the shallow one that are missing.
    lacking = {
        index: (segment.repeats - shallow[index]) / (deeper[index][index] - shallow[index])
        for index, segment in enumerate(segments)
        if segment.repeats > shallow[index]
    }
    models = [_with_repeats(config, repeats) for repeats in (*(deeper[index] for index in lacking), shallow)]
    try:
        programs = [make_program(recipe, model, devices, teacher=teacher) for model in models]
    except InputError:
        return None
    free = available_memory()
    if free is not None and _HELD * sum(map(_bytes, programs)) > free:
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


def _bytes(program: Program) -> int:
    leaves = jax.tree.leaves((program.state, program.frozen, program.arguments))
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in leaves)


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
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            values = np.zeros(leaf.shape, np.int32)
        elif path_name(path).endswith("norm/scale"):
            values = np.ones(leaf.shape, np.float32)
        else:
            values = random.uniform(-0.03, 0.03, leaf.shape).astype(np.float32)
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
