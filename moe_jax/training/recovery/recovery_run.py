"""Tunes what is small in a compressed model until its predictions are near the original's, or the time is over.

The loss is the divergence KL(original || compressed) of the predictions of each token, and nothing else. The rate is
constant after a short warm-up, and what is measured and kept is the average of the last steps: so a run is the
beginning of every longer run with the same seed, and however many steps an hour has, their number says what was done.
"""

import dataclasses
import math
import re
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.checkpoints.orbax_store import TrainingCheckpoints
from moe_jax.compression.recovery_figures import Recovery
from moe_jax.core.errors import InputError
from moe_jax.core.finite import cast
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.sharding import batch_shards, local_rows, make_mesh, path_name, place, state_shardings
from moe_jax.model_io.loading import abstract_model, disk_paths, layer_of, stacked_leaves
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.training.program import Program, first_state, initial_states, load_teacher, make_program
from moe_jax.training.recipe import (
    DistillSection,
    EmaSection,
    GroupSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    PartitionSection,
    Recipe,
    ScheduleSection,
    TrainSection,
)
from moe_jax.training.recovery.small_parameters import SMALL, small_parameters
from moe_jax.training.recovery.text_batches import Arrays, DividedRows, TextBatches, batches_once
from moe_jax.training.step import make_loss
from moe_jax.training.train_state import TrainState, averaged_params

# Relative to the root mean square of a parameter: scales of codes are a hundred times smaller than those of norms.
_RATE, _RATE_OF_NORMS = 3e-3, 1e-3
# A router that the compression left as it is chooses the original's experts: steps as large as those of norms change so
# many choices, which no gradient sees, that more is lost than won. One that lost experts has to choose anew.
_RATE_OF_ROUTERS, _RATE_OF_OTHER_ROUTERS = 1e-4, 1e-3
_WARMUP = 5
# The average is that of about 50 steps.
_DECAY = 0.98
# Those of auxiliary losses in the config of an MoE.
_COEFFICIENTS = ("balance_coef", "sequence_balance_coef", "z_coef", "cv_coef")
# Less is what another order of sums may make.
_LEAST_WON = 1e-6
# Steps after which the held-out rows are scored: these, and every multiple of the last one.
_SCORED_AFTER = (32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Limit:
    """The end of a recovery: after so many steps, or as many as go into so many minutes; the first that is reached."""

    steps: int | None = None
    minutes: float | None = None


class Scores(NamedTuple):
    """Means over the scored tokens of the held-out rows: divergence from the original, and cross-entropy, in nats."""

    divergence: float
    loss: float

    @property
    def are_finite(self) -> bool:
        return math.isfinite(self.divergence) and math.isfinite(self.loss)


class Recovered(NamedTuple):
    """The figures of a recovery, and the leaves that it changed, by path; none if nothing was won."""

    report: Recovery
    leaves: dict[str, np.ndarray]


def recipe_of_recovery(
    student: ModelSource, teacher: ModelSource, *, batch_size: int, seed: int, mesh: Mapping[str, int]
) -> Recipe:
    """Returns the recipe by which a compressed model is tuned; its paths, data and number of steps mean nothing.

    Raises `InputError` if there is nothing to tune.
    """
    small, specs, before = small_parameters(student.config), student.specs(), teacher.specs()
    routers = [path for path in small if "/router/" in path]
    same = all(path in before and specs[path].shape == before[path].shape for path in routers)
    rates = {
        ".*/router/.*": _RATE_OF_ROUTERS if same else _RATE_OF_OTHER_ROUTERS,
        ".*norm/(scale|bias)": _RATE_OF_NORMS,
    }
    groups = tuple(
        GroupSection(match=(pattern,), learning_rate=rate)
        for pattern, rate in rates.items()
        if any(re.fullmatch(pattern, path) for path in small)
    )
    return Recipe(
        run_dir="recovery",
        seed=seed,
        model=ModelSection(path="compressed"),
        partition=PartitionSection(train=(SMALL,)),
        optimizer=OptimizerSection(learning_rate=_RATE, b2=0.99, weight_decay=0.0, parameter_scale=True, groups=groups),
        schedule=ScheduleSection(kind="constant", warmup_steps=_WARMUP),
        ema=EmaSection(decay=_DECAY),
        distill=DistillSection(teacher="original"),
        train=TrainSection(batch_size=batch_size),
        mesh=MeshSection(**dict(mesh)),
    )


def run_recovery(
    student: ModelSource,
    teacher: ModelSource,
    rows: DividedRows,
    limit: Limit,
    *,
    batch_size: int = 8,
    seed: int = 0,
    mesh: Mapping[str, int] | None = None,
    devices: list[Any] | None = None,
    folder: Path | None = None,
    progress: Progress = no_progress,
) -> Recovered:
    """Tunes the small parameters of a compressed model against the original.

    Both models are in memory, each divided over the devices, and both go over every batch.

    Args:
      student: the compressed model, which is not changed.
      teacher: the model that it was compressed from.
      rows: of a text.
      limit: the end, which has steps or minutes. Minutes are those of the clock, with loading and compilation; those
        before an interruption count too.
      batch_size: rows of a step, rounded up to what the mesh divides.
      seed: of the order of the rows.
      mesh: sizes of the axes of the mesh; None: parameters are divided over all `devices` if their shapes allow it.
      devices: None: all.
      folder: for checkpoints, from which an interrupted run goes on; None: there are none.
      progress: called with the steps, or minutes, that are done.

    Raises:
      InputError: if there is nothing to tune, weights are not finite, or the compressed model's predictions are not.
      OSError: if the disk is full.
    """
    clock = _Clock(limit)
    clock.show(progress, 0)
    if mesh is None:
        mesh = _axes_for((student.config, teacher.config), devices)
    recipe = recipe_of_recovery(student, teacher, batch_size=batch_size, seed=seed, mesh=mesh)
    shards = batch_shards(make_mesh(dataclasses.asdict(recipe.mesh), devices).shape)
    recipe = dataclasses.replace(recipe, train=TrainSection(batch_size=-(-batch_size // shards) * shards))
    program = make_program(recipe, _without_auxiliary_losses(student.config), devices, teacher=teacher.config)
    with jax.set_mesh(program.mesh):
        run = _Run(program, recipe, student, teacher, rows)
        checkpoints = None if folder is None else TrainingCheckpoints(folder, keep=1)
        try:
            report, best = run.tune(clock, checkpoints, progress)
        finally:
            if checkpoints is not None:
                checkpoints.close()
        return Recovered(report, run.leaves(best) if report.best_step else {})


def _axes_for(configs: Iterable[ModelConfig], devices: list[Any] | None) -> dict[str, int]:
    """Returns the axes of a mesh: parameters are divided over all devices; if their shapes do not allow it, copied."""
    mesh = make_mesh({"fsdp": -1}, devices)
    try:
        for config in configs:
            state_shardings(nnx.state(abstract_model(config)), mesh)
    except InputError:
        return {"data": -1, "fsdp": 1}
    return {"fsdp": -1}


def _without_auxiliary_losses(config: ModelConfig) -> ModelConfig:
    """Returns the config with routers that are to choose as the original's do, and not more evenly."""
    layers = list(config.layers)
    for i in config.moe_layers:
        without = dataclasses.replace(config.moe(i), **dict.fromkeys(_COEFFICIENTS, 0.0))
        layers[i] = dataclasses.replace(layers[i], mlp=without)
    return dataclasses.replace(config, layers=tuple(layers))


class _Clock:
    """Says when the run is over; `before` are the seconds that an interrupted run took."""

    def __init__(self, limit: Limit):
        self.limit, self.before, self._began = limit, 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self._began

    def is_over(self, steps: int, needed: float) -> bool:
        """Whether there is no step, or no time for `needed` seconds, left."""
        if self.limit.steps is not None and steps >= self.limit.steps:
            return True
        return self.limit.minutes is not None and self.seconds + needed > 60 * self.limit.minutes

    def show(self, progress: Progress, steps: int) -> None:
        if self.limit.steps is not None:
            progress("recovering, steps", steps, self.limit.steps)
        elif self.limit.minutes is not None:
            progress("recovering, minutes", min(self.seconds / 60, self.limit.minutes), self.limit.minutes)


class _Run:
    """The two models on the devices, and the programs that tune and score them."""

    def __init__(self, program: Program, recipe: Recipe, student: ModelSource, teacher: ModelSource, rows: DividedRows):
        self._program, self._size = program, recipe.train.batch_size
        self._batches = TextBatches(rows.tuned, batch_size=self._size, seed=recipe.seed)
        self._held_out, self._tokens = rows.held_out, float(rows.held_out.weights.sum())
        stored = student.specs()
        names = {path: disk_paths(program.config, path, model=program.model) for path in program.trainable}
        self._dtypes = {path: stored[found[0]].dtype for path, found in names.items()}
        self._specs = {name: stored[name] for found in names.values() for name in found}
        self._params, self._frozen = initial_states(program, recipe, student)
        self._taught = load_teacher(program, teacher)
        loss_of = make_loss(program.graphdef, teacher=program.teacher)

        def sums(params: nnx.State, frozen: nnx.State, batch: Any, taught: nnx.State) -> tuple[jax.Array, jax.Array]:
            _, (loss, _, divergence, _) = loss_of(params, frozen, batch, jnp.float32(1), None, taught)
            return divergence, loss

        self._sums = jax.jit(sums, out_shardings=NamedSharding(program.mesh, P()))

    def tune(
        self, clock: _Clock, checkpoints: TrainingCheckpoints | None, progress: Progress
    ) -> tuple[Recovery, nnx.State]:
        """Runs the steps that are left, and returns what was won, and the best parameters."""
        kept = _Kept.read(checkpoints, self._program) or self._begin()
        clock.before = kept.seconds
        last, scored = int(kept.state.step), int(kept.state.step)
        state, steps, step_seconds = kept.state, last, 0.0
        while not clock.is_over(steps, step_seconds + kept.scoring_seconds):
            clock.show(progress, steps)
            began = time.monotonic()
            state, metrics = self._program.step(state, self._frozen, self._placed(self._batches[steps]), self._taught)
            assert metrics.distillation is not None
            divergence = float(metrics.distillation)  # waits for the step
            took = time.monotonic() - began
            # The first step is compiled, and says nothing of the next.
            step_seconds = 0.0 if steps == last else max(took, step_seconds)
            if not math.isfinite(divergence):
                break
            steps += 1
            kept = dataclasses.replace(kept, tokens=kept.tokens + int(metrics.scored))
            if _is_scored_after(steps):
                kept = self._scored(kept, state, steps)
                scored = steps
                if checkpoints is not None:
                    kept.write(checkpoints, state, clock.seconds)
        if steps > scored:
            kept = self._scored(kept, state, steps)
            if checkpoints is not None:  # for the model may take long to write
                kept.write(checkpoints, state, clock.seconds)
        clock.show(progress, steps)
        return kept.report(steps, clock.seconds, self._count, int(self._tokens)), kept.best

    def leaves(self, params: nnx.State) -> dict[str, np.ndarray]:
        """Returns the tuned leaves in the form and the dtypes that they have on the disk."""
        model = nnx.merge(self._program.graphdef, params, self._frozen)
        return {
            name: cast(name, np.asarray(layer_of(leaf, index)), self._specs[name].dtype)
            for name, (leaf, index) in stacked_leaves(model).items()
            if name in self._specs
        }

    @property
    def _count(self) -> int:
        return sum(math.prod(spec.shape) for spec in self._specs.values())

    def _begin(self) -> "_Kept":
        before, seconds = self._scores(self._params)
        if not before.are_finite:
            raise InputError(
                f"--recover: the compressed model's divergence from the original is {before.divergence} and its loss "
                f"{before.loss}: it cannot be tuned; compress less, or leave it out"
            )
        # Parameters before the first step are kept in a copy: the step takes over the buffers of its state.
        best = jax.tree.map(jnp.copy, self._params)
        state = first_state(self._program, self._params)
        return _Kept(state=state, best=best, before=before, after=before, scoring_seconds=seconds)

    def _scored(self, kept: "_Kept", state: TrainState, steps: int) -> "_Kept":
        """Scores the average of a state, and keeps it if it is the best."""
        params = self._as_stored(averaged_params(state, True))
        found, seconds = self._scores(params)
        kept = dataclasses.replace(kept, scoring_seconds=seconds)
        if not (found.are_finite and found.divergence < kept.after.divergence - _LEAST_WON):
            return kept
        return dataclasses.replace(kept, best=params, after=found, best_step=steps)

    def _scores(self, params: nnx.State) -> tuple[Scores, float]:
        """Returns the scores of parameters on the held-out rows, and the seconds that scoring takes once compiled."""
        totals, seconds = np.zeros(2), []
        for batch in batches_once(self._held_out, self._size):
            began = time.monotonic()
            found = self._sums(params, self._frozen, self._placed(batch), self._taught)
            totals += [float(one) for one in found]
            seconds.append(time.monotonic() - began)
        return Scores(*(totals / self._tokens).tolist()), len(seconds) * statistics.mean(seconds[1:] or seconds)

    def _as_stored(self, params: nnx.State) -> nnx.State:
        """Returns copies, rounded to the dtypes of the model on the disk: what is measured is what is written."""

        def rounded(path: tuple, leaf: jax.Array) -> jax.Array:
            # A copy also where nothing is rounded, because the next step takes over the buffers of the average.
            return jnp.array(leaf.astype(self._dtypes[path_name(path)]), leaf.dtype, copy=True)

        return jax.tree_util.tree_map_with_path(rounded, params)

    def _placed(self, batch: Arrays) -> dict[str, jax.Array]:
        mesh: Mesh = self._program.mesh
        rows = local_rows(mesh, self._size)
        return place({name: array[rows] for name, array in batch.items()}, rows, mesh, self._size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kept:
    """The state of a run between two steps, which checkpoints hold.

    Attributes:
      state: of the training step, as the run began with it.
      best: the parameters with the lowest divergence so far.
      before, after: scores of the compressed model, and of the best.
      best_step: the step of the best; 0: the compressed model.
      tokens: number of tokens learnt from.
      seconds: that the run took.
      scoring_seconds: that the next scoring takes.
    """

    state: TrainState
    best: nnx.State
    before: Scores
    after: Scores
    best_step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    scoring_seconds: float = 0.0

    @classmethod
    def read(cls, checkpoints: TrainingCheckpoints | None, program: Program) -> "_Kept | None":
        """Reads the last checkpoint; None: there is none."""
        step = None if checkpoints is None else checkpoints.latest_step()
        if checkpoints is None or step is None:
            return None
        arrays, extra = checkpoints.restore(step, {"state": program.state, "best": program.state.params})
        scores = {name: Scores(*extra.pop(name)) for name in ("before", "after")}
        return cls(**arrays, **scores, **extra)

    def write(self, checkpoints: TrainingCheckpoints, state: TrainState, seconds: float) -> None:
        """Begins to save a checkpoint."""
        extra: dict[str, Any] = {name: getattr(self, name) for name in ("best_step", "tokens", "scoring_seconds")}
        extra |= {"seconds": seconds, "before": list(self.before), "after": list(self.after)}
        checkpoints.save(int(state.step), {"state": state, "best": self.best}, extra)

    def report(self, steps: int, seconds: float, parameters: int, held_out_tokens: int) -> Recovery:
        """Returns the figures of the run."""
        return Recovery(
            steps=steps,
            best_step=self.best_step,
            seconds=seconds,
            parameters=parameters,
            tokens=self.tokens,
            held_out_tokens=held_out_tokens,
            divergence_before=self.before.divergence,
            divergence_after=self.after.divergence,
            loss_before=self.before.loss,
            loss_after=self.after.loss,
        )


def _is_scored_after(steps: int) -> bool:
    return steps in _SCORED_AFTER or steps % _SCORED_AFTER[-1] == 0
