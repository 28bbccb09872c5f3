"""Several subjects side by side: their most important figures, and their losses in one picture."""

from collections.abc import Sequence

from markupsafe import Markup

from moe_jax.core.formatting import show_bytes
from moe_jax.report.bytes_and_errors import last_compression
from moe_jax.report.describe_model import Sizes, experts_in_words
from moe_jax.report.elements import Cell, lines, table, with_spread
from moe_jax.report.evaluation_files import spread_of, value_of
from moe_jax.report.run_curves import median_speed, numbers, overlaid_losses
from moe_jax.report.subjects import Subject

_ORDER = (
    "what it is",
    "parameters",
    "active per token",
    "of its own",
    "on the disk",
    "experts",
    "compressed by",
    "bytes of experts that stay",
    "steps",
    "training loss, last",
    "held-out loss, last",
    "training tokens/s, median",
)


def side_by_side_table(subjects: Sequence[Subject], sizes: Sequence[Sizes | None]) -> list[Markup]:
    """A column for everything that has a model, a run or an evaluation; nothing for fewer than two.

    Args:
      subjects: all of them.
      sizes: of their models.
    """
    found = [
        (subject, _figures(subject, size))
        for subject, size in zip(subjects, sizes, strict=True)
        if subject.model is not None or subject.run is not None or subject.evaluations
    ]
    if len(found) < 2:
        return []
    given = dict.fromkeys(title for _, figures in found for title in figures)
    # What is measured of each comes last, whichever of them has it.
    titles = sorted(given, key=lambda title: _ORDER.index(title) if title in _ORDER else len(_ORDER))
    rows = [(title, *(figures.get(title, "") for _, figures in found)) for title in titles]
    columns = ["", *(subject.name for subject, _ in found)]
    runs = {subject.name: subject.run for subject in subjects if subject.run is not None}
    return [table("What each of them is and does", columns, rows, class_="compared"), overlaid_losses(runs)]


def _figures(subject: Subject, sizes: Sizes | None) -> dict[str, Cell]:
    figures: dict[str, Cell] = {"what it is": subject.kind}
    if subject.model is not None and sizes is not None:
        figures["parameters"] = f"{sizes.parameters:,}"
        figures["active per token"] = f"{sizes.active:,}"
        if sizes.own is not None:
            figures["of its own"] = f"{sizes.own:,}"
        figures["on the disk"] = show_bytes(sizes.stored)
        figures["experts"] = lines(experts_in_words(subject.model.config)) or "none"
        entry = last_compression(subject.model)
        if entry is not None:
            measured, options = entry.get("measured", {}), entry.get("options", {})
            figures["compressed by"] = str(options.get("method", ""))
            before, after = measured.get("expert_bytes_before"), measured.get("expert_bytes_after")
            if type(before) is int and type(after) is int and before > 0:
                figures["bytes of experts that stay"] = f"{after / before:.1%}"
    if subject.run is not None and subject.run.records:
        records = subject.run.records
        figures["steps"] = f"{records[-1]['step']:,}"
        for title, key in (("training loss, last", "loss"), ("held-out loss, last", "eval_loss")):
            if values := numbers(records, key).values:
                figures[title] = f"{values[-1]:.4f}"
        speed = median_speed(subject.run)
        if speed is not None:
            figures["training tokens/s, median"] = f"{speed:,.0f}"
    for evaluation in subject.evaluations:
        for score in evaluation.scores:
            figures[f"{score.task}: {score.metric}"] = with_spread(value_of(score), spread_of(score))
    return figures
