"""The reports of a run: metrics.jsonl, TensorBoard, Weights & Biases, a profiler trace, and lines on screen."""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import rich.console

from moe_jax.core.errors import InputError
from moe_jax.core.formatting import show_duration
from moe_jax.core.terminal import Pace, progress_bars
from moe_jax.distributed.processes import is_first_process
from moe_jax.files.json_toml import ANYTHING, parse_json
from moe_jax.files.storage_path import LocalFolder, as_path
from moe_jax.nn import Decoder
from moe_jax.nn.further.further_loss import further_routers
from moe_jax.nn.moe import stats_per_layer
from moe_jax.nn.projector import tokens_per_picture
from moe_jax.training.step import StepMetrics

NO_TENSORBOARD = (
    "no TensorBoard events are written: pip install 'moe-jax[tensorboard]', or set log.tensorboard to false"
)
_SECONDS = 20.0

WANDB_ID = "wandb_id"


def has_tensorboard() -> bool:
    """Whether tensorboardX is installed; importing it imports PyTorch, too, where that is installed."""
    return importlib.util.find_spec("tensorboardX") is not None


class EventWriter:
    """Appends scalars to a new event file in a directory, which is created if necessary; needs tensorboardX.

    Its `EventsWriter` is used, and not its `SummaryWriter`: that queues every scalar as an event of its own, which
    takes longer than a step where layers have many experts, and its `flush` does not wait for the queue. In a bucket
    the file appears when it is flushed or closed. TensorBoard no longer shows steps from `first_step` on that are in
    older files.
    """

    def __init__(self, directory: Path, *, first_step: int):
        from tensorboardX.event_file_writer import EventsWriter

        event_pb2: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        summary_pb2: Any = importlib.import_module("tensorboardX.proto.summary_pb2")
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._folder = as_path(directory).local_folder()
        self._events = EventsWriter(str(self._folder.path / "events"), filename_suffix=f".{os.getpid()}.{first_step}")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._events.write_event(event_pb2.Event(wall_time=time.time(), step=first_step, session_log=start))
        self._due = 0.0

    def write(self, step: int, scalars: Iterable[tuple[str, float]]) -> None:
        """Writes the scalars of a step, by tag; they are in the file some seconds later."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
        self._events.write_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        if time.monotonic() >= self._due:
            self._events.flush()
            self._due = time.monotonic() + _SECONDS

    def flush(self) -> None:
        """Returns when all events are in the file, or in the bucket."""
        self._events.flush()
        self._folder.flush()

    def close(self) -> None:
        """Closes the file; all is in its place."""
        self._events.close()
        self._folder.close()


def import_wandb() -> Any:
    """Imports the library, which nothing else imports; raises `InputError` if it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise InputError("log.wandb needs Weights & Biases: pip install 'moe-jax[wandb]'") from None


class WandbWriter:
    """Logs scalars to a run of Weights & Biases, named by `wandb_id` in `run_dir`: a continued run goes on there.

    Files, those of an offline run included, are in `RUN/wandb`, or for a run in a bucket in `wandb` of the current
    directory; `wandb sync` sends them later. `config` is the recipe, flat.
    """

    def __init__(self, run_dir: Path, *, mode: Literal["online", "offline"], project: str, config: Mapping[str, Any]):
        wandb, file = import_wandb(), run_dir / WANDB_ID
        if not file.is_file():
            as_path(file).replace_content(secrets.token_hex(4).encode())
        self._run = wandb.init(
            project=project,
            name=run_dir.resolve().name,
            id=file.read_text(encoding="utf-8").strip(),
            resume="allow",
            mode=mode,
            dir=str(as_path(run_dir).on_disk or Path.cwd()),
            config=dict(config),
        )
        # Our steps, and not those of Weights & Biases, are the axis: steps that an interrupted run wrote beyond its
        # last checkpoint come a second time, which its own steps do not allow.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: Iterable[tuple[str, float]]) -> None:
        """Logs the scalars of a step, by tag."""
        self._run.log({"step": step, **dict(scalars)})

    def close(self) -> None:
        """Ends the run of Weights & Biases; everything is sent, or in its files."""
        self._run.finish()


Record = dict[str, Any]
EVAL_LOSS_BEFORE = "eval_loss_before"
"""Key of the first step's record, for the held-out loss before that step: every line of a file is of a step."""


def to_record(model: Decoder, step: int, metrics: StepMetrics) -> Record:
    """Returns the metrics of a step of a model, JSON-able. Waits until the step is computed.

    Keys: `step`, `loss` (the cross-entropy, also with a teacher), `aux_loss` (added to the loss), `grad_norm`,
    `learning_rate` (of a step that was made with a schedule), `tokens`, `scored_tokens`; with a teacher `distill_loss`
    (see `StepMetrics`); with further layers that are trained `mtp_loss` (likewise), and if they are MoEs
    `mtp_expert_load` and `mtp_dropped` (by their own index, from 0); of a batch that may have pictures
    their number, `pictures`; for a model with an encoder also `input_tokens`, `cut_inputs` and `cut_targets`; for one
    with MoE layers `balance_loss`, `z_loss` and `cv_loss` (means over the layers, without coefficients; if asked for
    also `sequence_balance_loss`), `expert_load` and `dropped` (by layer index); if PEFT experts have routers of their
    own, `perft_balance_loss`, `perft_z_loss` and `perft_load` likewise. The loop adds speeds, `eval_loss` to steps
    after which held-out text is scored, and to the first step `eval_loss_before`, what it was before that step.
    """
    config, routers = model.config, model.routers()
    metrics = jax.tree.map(np.asarray, jax.device_get(metrics))
    record: Record = {
        "step": step,
        "loss": float(metrics.loss),
        "aux_loss": float(metrics.auxiliary),
        "grad_norm": float(metrics.grad_norm),
    }
    if metrics.learning_rate is not None:
        record["learning_rate"] = float(metrics.learning_rate)
    record |= {"tokens": int(metrics.tokens), "scored_tokens": int(metrics.scored)}
    if metrics.distillation is not None:
        record["distill_loss"] = float(metrics.distillation)
    if metrics.further is not None:
        record["mtp_loss"] = float(metrics.further)
        of_further = further_routers(config, config.further_layers)
        if ahead := stats_per_layer(config, metrics.further_router, routers=of_further[: len(metrics.further_router)]):
            record["mtp_expert_load"] = {str(i): [round(float(x), 6) for x in one.load] for i, one in ahead.items()}
            record["mtp_dropped"] = {str(i): float(one.dropped) for i, one in ahead.items()}
    if metrics.picture_tokens is not None and config.vision is not None:
        record["pictures"] = int(metrics.picture_tokens) // tokens_per_picture(config.vision, config.d_model)
    if config.has_encoder:
        record["input_tokens"] = int(metrics.input_tokens)
        record["cut_inputs"], record["cut_targets"] = (int(count) for count in metrics.cut)
    layers = stats_per_layer(config, metrics.router, routers=routers)
    if layers:
        for name in ("balance", "z", "cv"):
            record[f"{name}_loss"] = float(np.mean([getattr(stats, name) for stats in layers.values()]))
        if any(router.coefficients[3] for router in routers):
            record["sequence_balance_loss"] = float(np.mean([stats.sequence_balance for stats in layers.values()]))
        record["expert_load"] = {str(i): [round(float(x), 6) for x in stats.load] for i, stats in layers.items()}
        record["dropped"] = {str(i): float(stats.dropped) for i, stats in layers.items()}
    beside = stats_per_layer(config, metrics.router, of_perft=True, routers=routers)
    if beside:
        for name in ("balance", "z"):
            record[f"perft_{name}_loss"] = float(np.mean([getattr(stats, name) for stats in beside.values()]))
        record["perft_load"] = {str(i): [round(float(x), 6) for x in stats.load] for i, stats in beside.items()}
    return record


def is_finite(record: Record) -> bool:
    """Whether the losses and the gradient are finite; if not, that step's update has ruined the parameters."""
    numbers = ("loss", "aux_loss", "distill_loss", "mtp_loss", "grad_norm", "eval_loss")
    return all(math.isfinite(record.get(key, 0.0)) for key in numbers)


class MetricsWriter:
    """Appends records to metrics.jsonl and TensorBoard, after removing older ones of steps after `last_step`.

    Only the first process writes; in others this does nothing. In a bucket, records may appear half a minute later, and
    events when a checkpoint does.

    Args:
      tensorboard: whether to write events, where tensorboardX is installed.
      wandb: makes a writer for Weights & Biases; None: nothing is logged there.
    """

    def __init__(
        self, run_dir: Path, *, last_step: int, tensorboard: bool, wandb: Callable[[], WandbWriter] | None = None
    ):
        self._file = self._events = self._wandb = None
        if not is_first_process():
            return
        path = as_path(run_dir / "metrics.jsonl")
        self._file = path.growing(
            [json.dumps(record) + "\n" for record in read_metrics(path) if record["step"] <= last_step]
        )
        if tensorboard and has_tensorboard():
            self._events = EventWriter(run_dir / "tensorboard", first_step=last_step + 1)
        if wandb is not None:
            self._wandb = wandb()

    def write(self, record: Record) -> None:
        """Writes the record of a step to all places."""
        if self._file:
            self._file.write(json.dumps(record) + "\n")
        for writer in filter(None, (self._events, self._wandb)):
            if EVAL_LOSS_BEFORE in record:
                writer.write(0, [("eval_loss", record[EVAL_LOSS_BEFORE])])
            writer.write(record["step"], _flat(record))

    def flush(self) -> None:
        """Returns when all records are stored; a line of a file always is."""
        for writer in filter(None, (self._file, self._events)):
            writer.flush()

    def close(self) -> None:
        """Stores what was written, and closes all files."""
        for writer in filter(None, (self._file, self._events, self._wandb)):
            writer.close()


def read_metrics(path: Path) -> list[Record]:
    """Returns the records of a metrics.jsonl; an unfinished last line of a killed run is ignored."""
    records = []
    for line in as_path(path).read_grown().splitlines():
        try:
            records.append(parse_json(line, where=str(path), allow=ANYTHING))
        except InputError:
            break
    return records


class StepLine(contextlib.ExitStack):
    """Shows the metrics of the current step: beside a bar on a terminal, otherwise as a line every few steps.

    `first` steps of all `steps` were done before. Steps with an evaluation and the last step always have a line.
    """

    def __init__(self, console: rich.console.Console, *, first: int, steps: int, every: int):
        super().__init__()
        self._console, self._first, self._steps, self._every = console, first, steps, every
        self._pace = Pace(first, steps)

    def __enter__(self) -> "StepLine":
        self._bars = self.enter_context(progress_bars(self._console, lines=False))
        self._bars("training", self._first, self._steps, "compiling")
        return self

    def show(self, record: Record) -> None:
        """Shows the record of a step that was just done."""
        step, line = record["step"], _line(record)
        self._pace.update(step)
        self._bars("training", step, self._steps, line)
        # The bar disappears after the last step, so the metrics of that step are printed on a terminal too.
        due = not self._console.is_terminal and (step % self._every == 0 or "eval_loss" in record)
        if due or step == self._steps:
            left = "" if self._pace.left is None else f"  {show_duration(self._pace.left)} left"
            self._console.print(f"step {step}/{self._steps}  {line}{left}", highlight=False, soft_wrap=True)


def _line(record: Record) -> str:
    parts = [f"loss {record['loss']:.4f}"]
    parts += [f"{name} {record[f'{name}_loss']:.4f}" for name in ("distill", "eval") if f"{name}_loss" in record]
    parts.append(f"lr {record['learning_rate']:.2e}")
    if "tokens_per_second" in record:
        rate = record["flops_per_second"]
        unit, size = ("TFLOP/s", 1e12) if rate >= 1e12 else ("GFLOP/s", 1e9)
        parts += [f"{record['tokens_per_second']:,.0f} tokens/s", f"{rate / size:.3g} {unit}"]
    if "mfu" in record:
        parts.append(f"{record['mfu']:.1%} MFU")
    return "  ".join(parts)


def _flat(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Returns the scalars of a record by TensorBoard tag, such as `expert_load/layer_1/expert_0`."""
    scalars: list[tuple[str, float]] = []
    for key, value in record.items():
        if isinstance(value, int | float):
            scalars.append((key, value))
        elif isinstance(value, dict):
            for layer, entry in value.items():
                entries = enumerate(entry) if isinstance(entry, list) else [(None, entry)]
                for expert, number in entries:
                    scalars.append((f"{key}/layer_{layer}" + ("" if expert is None else f"/expert_{expert}"), number))
    return [(tag, value) for tag, value in scalars if tag not in ("step", EVAL_LOSS_BEFORE)]


class StepTrace(contextlib.AbstractContextManager):
    """Traces steps `first` to `last`, both included; without them, nothing.

    Steps that are not run are not waited for. Every process writes a trace of its own devices, by the profiler as
    `plugins/profile/TIME/` in the directory; in a bucket when the trace ends.
    """

    def __init__(self, directory: Path, steps: tuple[int, ...]):
        self._directory = directory
        self._first, self._last = steps or (0, -1)
        self._folder: LocalFolder | None = None  # of the trace that is being made

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Call before each step, and run the step inside."""
        if self._folder is None and self._first <= number <= self._last:
            self._folder = as_path(self._directory).local_folder()
            jax.profiler.start_trace(self._folder.path)
        return jax.profiler.StepTraceAnnotation("train", step_num=number) if self._folder else contextlib.nullcontext()

    def after(self, number: int, result: Any) -> bool:
        """Ends the trace after its last step, when `result` is computed; returns whether it did."""
        if self._folder is None or number < self._last:
            return False
        jax.block_until_ready(result)
        self.__exit__()
        return True

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            jax.profiler.stop_trace()
            self._folder.close()
            self._folder = None
