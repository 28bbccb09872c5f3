"""What a run reports: every step as a line of metrics.jsonl and as TensorBoard events, and the progress on screen."""

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console

from moe_jax.formatting import show_duration
from moe_jax.models import ModelConfig
from moe_jax.nn.router_stats import stats_per_layer
from moe_jax.processes import is_first_process
from moe_jax.staging import replace_file
from moe_jax.terminal import Pace, progress_bars
from moe_jax.train.step import StepMetrics
from moe_jax.train.tensorboard import EventWriter

Record = dict[str, Any]


def to_record(config: ModelConfig, step: int, metrics: StepMetrics) -> Record:
    """One step as JSON: waits until the step is computed.

    Keys: `step`, `loss`, `aux_loss` (what is added to the loss), `grad_norm`, `learning_rate`, `tokens`,
    `scored_tokens`; for a model with MoE layers also `balance_loss`, `z_loss` and `cv_loss` (means over the layers,
    without coefficients), `expert_load` and `dropped` (by layer index); where PEFT experts have routers of their own,
    `perft_balance_loss`, `perft_z_loss` and `perft_load` likewise.
    """
    metrics = jax.tree.map(np.asarray, jax.device_get(metrics))
    record: Record = {
        "step": step,
        "loss": float(metrics.loss),
        "aux_loss": float(metrics.auxiliary),
        "grad_norm": float(metrics.grad_norm),
        "learning_rate": float(metrics.learning_rate),
        "tokens": int(metrics.tokens),
        "scored_tokens": int(metrics.scored),
    }
    layers = stats_per_layer(config, metrics.router)
    if layers:
        record["balance_loss"] = float(np.mean([stats.balance for stats in layers.values()]))
        record["z_loss"] = float(np.mean([stats.z for stats in layers.values()]))
        record["cv_loss"] = float(np.mean([stats.cv for stats in layers.values()]))
        record["expert_load"] = {str(i): [round(float(x), 6) for x in stats.load] for i, stats in layers.items()}
        record["dropped"] = {str(i): float(stats.dropped) for i, stats in layers.items()}
    beside = stats_per_layer(config, metrics.router, of_perft=True)
    if beside:
        record["perft_balance_loss"] = float(np.mean([stats.balance for stats in beside.values()]))
        record["perft_z_loss"] = float(np.mean([stats.z for stats in beside.values()]))
        record["perft_load"] = {str(i): [round(float(x), 6) for x in stats.load] for i, stats in beside.items()}
    return record


def is_finite(record: Record) -> bool:
    """Whether the loss and the gradient are; if not, the update of that step has spoilt the parameters."""
    return all(math.isfinite(record[key]) for key in ("loss", "aux_loss", "grad_norm"))


class MetricsWriter:
    """Appends records to metrics.jsonl and TensorBoard. Steps after `last_step`, of a run that went further, are cut.

    Only the first process writes; in others this does nothing.

    Args:
      run_dir: holds both.
      last_step: the step that training continues after; 0 for a new run.
      tensorboard: whether to write events.
    """

    def __init__(self, run_dir: Path, *, last_step: int, tensorboard: bool):
        self._file = self._events = None
        if not is_first_process():
            return
        path = run_dir / "metrics.jsonl"
        _cut_after(path, last_step)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            self._events = EventWriter(run_dir / "tensorboard", first_step=last_step + 1)

    def write(self, record: Record) -> None:
        if self._file:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self._events:
            self._events.write(record["step"], _flat(record))

    def close(self) -> None:
        if self._file:
            self._file.close()
        if self._events:
            self._events.close()


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics.jsonl; a last line that a killed run left unfinished is ignored."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


class StepLine:
    """Shows the figures of a step: beside a bar on a terminal, as a line now and then elsewhere. A context manager.

    Args:
      console: where to show them.
      first: steps done before.
      steps: all steps of the run.
      every: elsewhere than on a terminal, show every so many steps; those with an evaluation and the last one always.
    """

    def __init__(self, console: rich.console.Console, *, first: int, steps: int, every: int):
        self._console = console
        self._first = first
        self._steps = steps
        self._every = every
        self._pace = Pace(first, steps)
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> "StepLine":
        self._bars = self._exit.enter_context(progress_bars(self._console))
        self._bars("training", self._first, self._steps, "compiling")
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def show(self, record: Record) -> None:
        """Shows the record of a step that was just done."""
        step, line = record["step"], _line(record)
        self._pace.update(step)
        self._bars("training", step, self._steps, line)
        # The bar disappears with the last step, whose figures are printed on a terminal too.
        due = not self._console.is_terminal and (step % self._every == 0 or "eval_loss" in record)
        if due or step == self._steps:
            left = "" if self._pace.left is None else f"  {show_duration(self._pace.left)} left"
            self._console.print(f"step {step}/{self._steps}  {line}{left}", highlight=False, soft_wrap=True)


def _line(record: Record) -> str:
    parts = [f"loss {record['loss']:.4f}"]
    if "eval_loss" in record:
        parts.append(f"eval {record['eval_loss']:.4f}")
    parts.append(f"lr {record['learning_rate']:.2e}")
    if "tokens_per_second" in record:
        parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        parts.append(_flops(record["flops_per_second"]))
    return "  ".join(parts)


def _flops(rate: float) -> str:
    unit, size = ("TFLOP/s", 1e12) if rate >= 1e12 else ("GFLOP/s", 1e9)
    return f"{rate / size:.3g} {unit}"


def _cut_after(path: Path, last_step: int) -> None:
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= last_step]
    # Being killed here must not lose the curve so far.
    replace_file(path, "".join(json.dumps(record) + "\n" for record in kept).encode())


def _flat(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Scalars by TensorBoard tag: `expert_load/layer_1/expert_0`."""
    scalars: list[tuple[str, float]] = []
    for key, value in record.items():
        if isinstance(value, int | float):
            scalars.append((key, value))
        elif isinstance(value, dict):
            for layer, entry in value.items():
                entries = enumerate(entry) if isinstance(entry, list) else [(None, entry)]
                for expert, number in entries:
                    scalars.append((f"{key}/layer_{layer}" + ("" if expert is None else f"/expert_{expert}"), number))
    return [(tag, value) for tag, value in scalars if tag != "step"]
