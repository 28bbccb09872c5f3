"""The training loop: metrics fetched one step late, held-out evaluation, checkpoints, and all ways to stop."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from types import FrameType
from typing import Any

import jax
import rich.console
from flax import nnx

from moe_jax.checkpoints.orbax_store import TrainingCheckpoints
from moe_jax.core.errors import InputError
from moe_jax.data.sections import input_length
from moe_jax.distributed import processes
from moe_jax.evaluation.held_out import Evaluator
from moe_jax.experts import ExpertBank, set_exchange
from moe_jax.files.storage_path import as_path
from moe_jax.training import recipe_toml
from moe_jax.training.batches import Batches
from moe_jax.training.flops import peak_flops, step_flops
from moe_jax.training.metrics import (
    EVAL_LOSS_BEFORE,
    MetricsWriter,
    Record,
    StepLine,
    StepTrace,
    WandbWriter,
    is_finite,
    to_record,
)
from moe_jax.training.program import Program, metrics_of
from moe_jax.training.recipe import Recipe
from moe_jax.training.run_directory import CHECKPOINTS
from moe_jax.training.step import StepMetrics
from moe_jax.training.train_state import TrainState, averaged_params


class StopSignals:
    """Remembers that a signal arrived, as `received`; a second one of the same kind has its usual effect.

    A context manager. Several processes agree on a step: a signal to one stops all. If a program other than
    `join_processes` has joined them, JAX's preemption service does that; it watches for SIGTERM, so other signals are
    passed on to it as SIGTERM.

    `notice` is called, in a thread of its own, with the name of the first signal: a step may take long.
    """

    def __init__(self, notice: Callable[[str], object] = lambda name: None) -> None:
        self._notice = notice
        self.received: int | None = None
        self._passed_on = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            alone = jax.process_count() == 1 or processes.has_coordination()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if alone else (signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                    self._previous[number] = signal.signal(number, self._remember if alone else self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def stop_after(self, step: int) -> bool:
        """Whether to save and stop after `step`. Every process calls this after every step; all get the same answer."""
        if jax.process_count() == 1:
            return self.received is not None
        if self.received is not None and not self._passed_on:
            self._passed_on = True
            processes.ask_all_to_stop(self.received)
        agreed = processes.stop_after(step)
        if agreed is not None:
            self.received = agreed
        return agreed is not None

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self._previous[number])
        os.kill(os.getpid(), signal.SIGTERM)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._previous[number])
        # In another thread: the code that the signal interrupted may be printing.
        threading.Thread(target=self._notice, args=(signal.Signals(number).name,), daemon=True).start()


# A run stops if so many of its first batches have nothing to learn from.
_UNSCORED = 20


class Diverged(InputError):
    """The loss, on the batch or held out, or the gradient is not finite."""


class Stopped(Exception):
    """A signal ended the run; a checkpoint was saved and the user was told how to continue. `signal` is its number."""

    def __init__(self, number: int):
        super().__init__(number)
        self.signal = number


class Loop:
    """Runs the steps of a recipe.

    `batches` are positioned where training continues; `frozen` and `teacher` are the parameters that are not trained.
    """

    def __init__(
        self,
        recipe: Recipe,
        program: Program,
        *,
        frozen: nnx.State,
        batches: Batches,
        checkpoints: TrainingCheckpoints,
        evaluator: Evaluator | None,
        console: rich.console.Console,
        continue_command: str,
        teacher: nnx.State | None = None,
    ):
        self._recipe, self._program, self._checkpoints, self._evaluator = recipe, program, checkpoints, evaluator
        self._frozen, self._teacher = frozen, () if teacher is None else (teacher,)
        self._console, self._continue_command = console, continue_command
        self._batches = batches
        flops = partial(step_flops, program.config, recipe.data.seq_len, input_length(recipe.data))
        flops = partial(flops, further=recipe.further_depth(program.config.further_layers))
        # Batches have features in place of pixels, or pixels.
        self._flops, self._flops_of_kept = flops(tower=program.tower_use), flops(tower="kept")
        device = program.mesh.devices.flat[0]
        peak = peak_flops(device.device_kind, device.platform, recipe.model.compute_dtype, recipe.log.peak_flops)
        self._peak = None if peak is None else peak * program.mesh.size
        self._saved = checkpoints.latest_step()
        self._clock = time.monotonic()
        self._last: Record = {}
        # Batches in which nothing was scored, and whether anything was in another.
        self._unscored, self._was_scored = 0, False
        self._check = exchange_check(recipe, program)
        self._eval_loss_before: float | None = None

    def run(self, state: TrainState) -> tuple[TrainState, Record]:
        """Trains from `state`, whose buffers are donated, to the last step or the end of the data.

        Returns:
          The state, and the record of the last step (empty if no step was left).

        Raises:
          Diverged: if the loss or gradient is not finite; the message names the step and the last good checkpoint.
          Stopped: after a signal, once the checkpoint is on disk.
        """
        first = int(state.step)
        self._was_scored = first > 0  # otherwise the run would have stopped
        recipe, run_dir = self._recipe, as_path(self._recipe.run_dir)
        # Signals are heard before the writers are made, whose imports take a second.
        with jax.set_mesh(self._program.mesh), StopSignals(self._say_stopping) as signals:
            log, wandb = recipe.log, None
            if log.wandb != "off":
                config = recipe_toml.flatten(recipe)
                wandb = partial(WandbWriter, run_dir, mode=log.wandb, project=log.wandb_project, config=config)
            writer = MetricsWriter(run_dir, last_step=first, tensorboard=log.tensorboard, wandb=wandb)
            progress = StepLine(self._console, first=first, steps=recipe.train.steps, every=log.every)
            with closing(writer), progress, StepTrace(run_dir / "profile", log.profile_steps) as trace:
                return self._steps(state, signals, writer, progress, trace), self._last

    def _steps(
        self, state: TrainState, signals: StopSignals, writer: MetricsWriter, progress: StepLine, trace: StepTrace
    ) -> TrainState:
        recipe = self._recipe
        step, steps = int(state.step), recipe.train.steps
        pending: tuple[int, StepMetrics] | None = None
        if step == 0:
            self._evaluate_before(state)

        def report(*, evaluate: TrainState | None = None) -> None:
            nonlocal pending
            if pending:
                record = self._finish(*pending, evaluate)
                writer.write(record)
                progress.show(record)
            pending = None

        while step < steps:
            batch = next(self._batches, None)
            if batch is None:
                self._console.print(f"the data ended after {step} of {steps} steps", highlight=False)
                report(evaluate=None if self._evaluator is None else state)
                break
            if "features" in batch:
                self._flops = self._flops_of_kept
            compare = None if self._check is None else self._check(state, self._frozen, batch, *self._teacher)
            self._check = None
            with trace.step(step + 1):
                state, metrics = self._program.step(state, self._frozen, batch, *self._teacher)
            if compare is not None:
                compare(metrics)
            # The devices work on this step while the metrics of the previous one are fetched and written.
            report()
            step += 1
            pending = step, metrics
            if trace.after(step, metrics):
                self._say(f"wrote a trace to {as_path(recipe.run_dir) / 'profile'}")
            stop = signals.stop_after(step)
            saves = stop or step % recipe.checkpoint.every == 0 or step == steps
            due = recipe.eval is not None and (step % recipe.eval.every == 0 or step == steps)
            # A checkpoint comes after the record of its step, which must have the evaluation at the end of the data.
            if self._evaluator is not None and (due or saves and self._batches.is_at_end()):
                report(evaluate=state)
            if saves:
                # Metrics come first: a state with a loss that is not finite must not be saved.
                report()
                writer.flush()
                self._save(step, state)
            if stop and step < steps:
                self._stop(step, signals)
        report()
        if self._unscored and not self._was_scored:
            raise InputError(self._nothing_scored())
        if self._saved != step:
            self._save(step, state)
        self._checkpoints.wait()
        return state

    def _evaluate_before(self, state: TrainState) -> None:
        """Scores the held-out text before the first step: what the run gains is seen beside it."""
        if self._evaluator is None:
            return
        found = self._held_out_loss(state)
        if not math.isfinite(found):
            raise Diverged(f"the held-out loss of the model is {found} before training; see moe-jax inspect --weights")
        self._say(f"held-out loss before training: {found:.4f}")
        self._eval_loss_before = found
        self._clock = time.monotonic()

    def _held_out_loss(self, state: TrainState) -> float:
        assert self._evaluator is not None
        ema = self._recipe.ema
        return self._evaluator(averaged_params(state, ema is not None and ema.evaluate), self._frozen).nll

    def _finish(self, step: int, metrics: StepMetrics, evaluate: TrainState | None) -> Record:
        """Waits for a step and checks it; adds the speed, and the held-out loss if a state is given."""
        record = to_record(self._program.model, step, metrics)
        self._check_finite(record)
        self._check_scored(record)
        seconds = time.monotonic() - self._clock
        record["seconds"] = seconds
        tokens, inputs = record["tokens"], record.get("input_tokens", 0)
        record["tokens_per_second"] = (tokens + inputs) / seconds
        record["flops_per_second"] = self._flops(tokens, inputs, record.get("pictures", 0)) / seconds
        if self._peak is not None:
            record["mfu"] = record["flops_per_second"] / self._peak
        if self._eval_loss_before is not None:
            record[EVAL_LOSS_BEFORE], self._eval_loss_before = self._eval_loss_before, None
        if evaluate is not None:
            record["eval_loss"] = self._held_out_loss(evaluate)
            self._check_finite(record)
        self._clock = time.monotonic()
        self._last = record
        return record

    def _check_scored(self, record: Record) -> None:
        """Says when nothing of a batch is scored, and raises `InputError` if that is so from the first batch on."""
        if record["scored_tokens"]:
            self._was_scored = True
            return
        self._unscored += 1
        if not self._was_scored and (self._unscored == _UNSCORED or record["step"] == self._recipe.train.steps):
            raise InputError(self._nothing_scored())
        if self._unscored <= _UNSCORED:
            self._say(f"step {record['step']}: no token of the batch is scored: there is nothing to learn from it")

    def _nothing_scored(self) -> str:
        """Returns a sentence on a run that has learnt from nothing."""
        return (
            f"no token of the first {self._unscored} batches is scored: where prompts are longer than data.seq_len = "
            f"{self._recipe.data.seq_len}, nothing of the responses may be left; see: moe-jax data inspect"
        )

    def _save(self, step: int, state: TrainState) -> None:
        self._checkpoints.save(step, state, {"data": self._batches.position()})
        self._saved = step
        self._clock = time.monotonic()

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def _say_stopping(self, name: str) -> None:
        self._say(f"{name}: saving a checkpoint after this step; a second {name} ends the run at once, without saving")

    def _stop(self, step: int, signals: StopSignals) -> None:
        assert signals.received is not None
        self._checkpoints.wait()
        steps, name = self._recipe.train.steps, signal.Signals(signals.received).name
        self._say(f"{name}: step {step} of {steps} is saved; continue with: {self._continue_command}")
        raise Stopped(signals.received)

    def _check_finite(self, record: Record) -> None:
        if is_finite(record):
            return
        run_dir, last = as_path(self._recipe.run_dir), self._checkpoints.latest_step()
        if last is None:
            go_on = "no checkpoint had been saved yet; begin anew with a lower optimizer.learning_rate"
            if record["step"] > 1:
                go_on += f", or with checkpoint.every below {record['step']}, so that --restart can --skip-batches"
        else:
            go_on = (
                f"the last good checkpoint is {run_dir / CHECKPOINTS / str(last)}; go on from it, or from an earlier "
                f"one, with --restart {run_dir}@{last}, another run_dir, and a lower optimizer.learning_rate or "
                "--skip-batches"
            )
        held_out = f", the held-out loss {record['eval_loss']}" if "eval_loss" in record else ""
        raise Diverged(f"{divergence(record)}{held_out}; {go_on}")


def divergence(record: Record) -> str:
    """Returns a sentence on a step that is not finite."""
    return f"step {record['step']}: loss is {record['loss']} and the gradient norm {record['grad_norm']}"


def exchange_check(recipe: Recipe, program: Program) -> Callable[..., Callable[[StepMetrics], None]] | None:
    """Makes the check of a run's first step; None: there is nothing to check.

    By default there is a check on GPUs if tokens come to experts by all-to-all; `model.check_exchange` overrides this.
    It is a function of the step's arguments, which computes the step by all-gather, without an update, and returns
    another function, which compares the metrics of the real step, and raises `InputError` where they differ.
    """
    asked = recipe.model.check_exchange
    platform = program.mesh.devices.flat[0].platform
    if asked is False or asked is None and platform not in ("gpu", "cuda"):
        return None
    experts = program.mesh.shape["expert"]
    banks = [module for _, module in nnx.iter_modules(program.model) if isinstance(module, ExpertBank)]
    # Whatever the number of experts per token, `chosen` says all-gather where there are few devices.
    if experts == 1 or all(bank.exchange.way == "all-gather" for bank in banks):
        return None
    by_gather = metrics_of(recipe, program, lambda model: set_exchange(model, "all-gather"))

    def before(*arguments: Any) -> Callable[[StepMetrics], None]:
        expected = jax.device_get(by_gather(*arguments))

        def after(metrics: StepMetrics) -> None:
            # Relative, of the loss and of the gradient's norm: the order of sums differs.
            tolerance = {"float32": 1e-3, "bfloat16": 2e-2}[recipe.model.compute_dtype]
            for name in ("loss", "grad_norm"):
                found, right = float(getattr(metrics, name)), float(getattr(expected, name))
                # A loss that is not finite either way is no fault of the exchange, and the loop reports it.
                if math.isfinite(right) and not abs(found - right) <= tolerance * abs(right):
                    raise InputError(
                        f"the first step's {name} is {found:.6g} with tokens exchanged by all-to-all, and {right:.6g} "
                        "by all-gather: the exchange does not work on these devices; set model.exchange = 'all-gather'"
                    )

        return after

    return before
