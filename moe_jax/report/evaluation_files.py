"""Evaluations as JSON: what `moe-jax eval` prints with --json or writes with --output, and what lm-eval writes."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from moe_jax.core.errors import InputError, shown
from moe_jax.report.elements import table


class Score(NamedTuple):
    """One figure.

    Attributes:
      task: what was to be done.
      metric: what was counted.
      value: the figure.
      error: its standard error; None where there is none.
      count: examples, or tokens.
      interval: low and high end of a 95% interval.
    """

    task: str
    metric: str
    value: float
    error: float | None = None
    count: int | None = None
    interval: tuple[float, float] | None = None


class Evaluation(NamedTuple):
    """An evaluation, as a file holds it.

    Attributes:
      path: of the file.
      model: what was evaluated: a path as it was given, or a name.
      scores: the figures.
      labels: of a classification, the names of the labels.
      confusion: of a classification, how often a label (row) was given which (column).
    """

    path: Path
    model: str
    scores: tuple[Score, ...]
    labels: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()


def is_evaluation(data: Any) -> bool:
    """Whether a JSON value looks like one."""
    return isinstance(data, dict) and ("perplexity" in data or "accuracy" in data or "results" in data)


def parse_evaluation(data: Mapping[str, Any], path: Path) -> Evaluation:
    """Reads one of the three kinds.

    Raises:
      InputError: if a figure that there must be is absent or of another kind.
    """
    if "results" in data:
        return _of_tasks(data, path)
    if "perplexity" in data:
        text = Path(_text(data, "text", path)).name
        tokens = _count(data.get("tokens"))
        scores = [Score(text, name, _number(data, name, path), count=tokens) for name in ("perplexity", "nll")]
        return Evaluation(path, _text(data, "model", path), tuple(scores))
    low, high = _interval(data, path)
    score = Score(
        Path(_text(data, "file", path)).name,
        "accuracy",
        _number(data, "accuracy", path),
        count=_count(data.get("count")),
        interval=(low, high),
    )
    labels, confusion = data.get("labels"), data.get("confusion")
    names = tuple(map(str, labels)) if isinstance(labels, list) else ()
    return Evaluation(path, _text(data, "model", path), (score,), names, _matrix(confusion, len(names)))


def _of_tasks(data: Mapping[str, Any], path: Path) -> Evaluation:
    """lm-eval has `metric,filter` and `metric_stderr,filter` as keys of a task."""
    results, samples = data["results"], data.get("n-samples")
    if not isinstance(results, dict) or not all(isinstance(found, dict) for found in results.values()):
        raise InputError(f"{path}: results is {shown(results)}, expected an object with an object for every task")
    scores = []
    for task, found in results.items():
        counted = samples.get(task) if isinstance(samples, dict) else None
        count = _count(counted.get("effective")) if isinstance(counted, dict) else None
        for key, value in found.items():
            metric, comma, how = key.partition(",")
            if not comma or metric.endswith("_stderr") or not is_number(value):
                continue
            error = found.get(f"{metric}_stderr,{how}")
            named = metric if how == "none" else f"{metric} ({how})"
            scores.append(Score(task, named, float(value), float(error) if is_number(error) else None, count))
    config = data.get("config")
    arguments = config.get("model_args") if isinstance(config, dict) else None
    if isinstance(arguments, dict):
        name = arguments.get("path") or arguments.get("pretrained")
    else:
        given = re.search(r"(?:^|,)pretrained=([^,]*)", str(arguments or ""))
        name = given[1] if given else None
    return Evaluation(path, str(name or data.get("model_name") or path), tuple(scores))


def _interval(data: Mapping[str, Any], path: Path) -> tuple[float, float]:
    ends = data.get("interval")
    if not isinstance(ends, list) or len(ends) != 2 or not all(map(is_number, ends)):
        raise InputError(f"{path}: interval is {shown(ends)}, expected two numbers")
    return float(ends[0]), float(ends[1])


def _number(data: Mapping[str, Any], key: str, path: Path) -> float:
    if not is_number(data.get(key)):
        raise InputError(f"{path}: {key} is {shown(data.get(key))}, expected a number")
    return float(data[key])


def _text(data: Mapping[str, Any], key: str, path: Path) -> str:
    if not isinstance(data.get(key), str):
        raise InputError(f"{path}: {key} is {shown(data.get(key))}, expected a text")
    return data[key]


def _count(value: Any) -> int | None:
    return value if type(value) is int else None


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _matrix(rows: Any, size: int) -> tuple[tuple[int, ...], ...]:
    """Counts for every pair of labels; nothing if there are others."""
    whole = isinstance(rows, list) and len(rows) == size
    if not whole or not all(isinstance(row, list) and list(map(_count, row)) == row for row in rows):
        return ()
    return tuple(map(tuple, rows))


def score_tables(evaluations: Sequence[Evaluation]) -> list[Markup]:
    """All figures of a model, and the labels of its classifications; nothing without an evaluation."""
    rows = [
        (score.task, score.metric, value_of(score), spread_of(score), "" if score.count is None else f"{score.count:,}")
        for evaluation in evaluations
        for score in evaluation.scores
    ]
    columns = ("task or text", "figure", "value", "standard error, or 95% interval", "examples or tokens")
    tables = [table("Figures of every task and text", columns, rows, words=2)]
    for evaluation in evaluations:
        if evaluation.confusion:
            cells = [
                (name, *(f"{count:,}" for count in row))
                for name, row in zip(evaluation.labels, evaluation.confusion, strict=True)
            ]
            titles = ("label", *(f"given {name}" for name in evaluation.labels))
            tables.append(table(f"Labels of {evaluation.scores[0].task}, and those given", titles, cells))
    return tables


def value_of(score: Score) -> str:
    """The figure, with as many digits as it deserves."""
    return f"{score.value:,.4f}" if abs(score.value) < 1000 else f"{score.value:,.1f}"


def spread_of(score: Score) -> str:
    """How sure it is."""
    if score.interval is not None:
        return f"{score.interval[0]:.4f} to {score.interval[1]:.4f}"
    return "" if score.error is None else f"± {score.error:.4f}"
