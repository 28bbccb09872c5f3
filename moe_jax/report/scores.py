"""Evaluations as tables: figures with their standard errors, and labels given for which."""

from collections.abc import Sequence

from markupsafe import Markup

from moe_jax.report.elements import table
from moe_jax.report.evaluation_files import Evaluation, Score


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
