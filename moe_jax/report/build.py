"""The report: a page with what is known of its subjects, and several of them side by side."""

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

import moe_jax
from moe_jax.core.formatting import show_bytes
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.figures import measure_layers
from moe_jax.files.staging import check_beside, check_target
from moe_jax.files.storage_path import as_path
from moe_jax.report.elements import Cell, html_page, joined, lines, note, section, table, with_spread
from moe_jax.report.evaluation_files import score_tables, spread_of, value_of
from moe_jax.report.model_sections import (
    Sizes,
    compression_tables,
    experts_in_words,
    last_compression,
    lineage_steps,
    measured_pictures,
    model_facts,
    similarity_pictures,
    sizes_of,
    sweep_pictures,
)
from moe_jax.report.run_curves import (
    median_speed,
    numbers,
    overlaid_losses,
    recipe_text,
    training_curves,
    training_facts,
    use_of_experts,
)
from moe_jax.report.subjects import Subject, named, open_subject, with_evaluations

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
    """A column for everything that has a model, a run or an evaluation; nothing for fewer than two."""
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


_COMPARED = "compared"


def write_report(
    paths: Sequence[Path],
    out: Path,
    *,
    base: Path | None = None,
    weights: bool = True,
    progress: Progress = no_progress,
) -> int:
    """Writes one HTML file about models, runs, sweeps and evaluations.

    Args:
      paths: of the subjects, at least one; see `open_subject`.
      out: the file, which must not exist, nor lie inside one of the paths. It appears when it is complete.
      base: see `open_subject`.
      weights: whether the weights of models are read, to compare their experts. One matrix of the experts of a layer
        is in memory at a time.
      progress: called as layers are compared.

    Returns:
      The bytes of the file.

    Raises:
      FileNotFoundError, InputError: see `open_subject`; or `out` cannot be written. Then nothing is.
    """
    out = as_path(out)
    check_target(out, buckets=True)
    check_beside(out, [path for path in paths if as_path(path).is_dir()])
    out.check_parent()
    given = {as_path(path).resolve(): path for path in paths}
    subjects = named(with_evaluations([open_subject(path, base=base) for path in given.values()]))
    content = build_report(subjects, weights=weights, progress=progress).encode()
    out.replace_content(content)
    return len(content)


def build_report(subjects: Sequence[Subject], *, weights: bool = True, progress: Progress = no_progress) -> str:
    """The page; see `write_report`."""
    sizes = [None if subject.model is None else sizes_of(subject.model) for subject in subjects]
    compared = section("Side by side", *side_by_side_table(subjects, sizes), id_=_COMPARED)
    contents = [(_COMPARED, "Side by side")] if compared else []
    sections = []
    for number, (subject, size) in enumerate(zip(subjects, sizes, strict=True), start=1):
        of_subject = list(_sections(subject, size, weights, progress))
        of = f" of {subject.evaluations[0].model}" if subject.model is None and subject.evaluations else ""
        place = note(f"{subject.kind}{of}: {subject.path}")
        sections.append(section(subject.name, place, *of_subject, id_=f"subject-{number}"))
        contents.append((f"subject-{number}", subject.name))
    names = ", ".join(subject.name for subject in subjects) if len(subjects) < 4 else f"{len(subjects)} subjects"
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    subtitle = f"made by moe-jax {moe_jax.__version__} on {now}"
    return html_page(f"Report: {names}", compared, joined(*sections), subtitle=subtitle, contents=contents)


def _sections(subject: Subject, sizes: Sizes | None, weights: bool, progress: Progress) -> Iterator[Markup]:
    """Yields the sections about one subject; empty is what there is nothing to say of."""
    title = subject.name
    if subject.model is not None and sizes is not None:
        yield section("The model", model_facts(subject.model, sizes), level=3)
    if subject.run is not None:
        run = subject.run
        yield section("Training", training_facts(run), *training_curves(run), recipe_text(run), level=3)
        yield section("Use of the experts in training", *use_of_experts(run, title), level=3)
    if subject.model is not None:
        yield section("Compression", *compression_tables(subject.model), level=3)
    if subject.sweep is not None:
        yield section("Quality against bytes", *sweep_pictures(subject.sweep, title), level=3)
    if subject.measured is not None:
        yield section("Experts", *measured_pictures(subject.measured), level=3)
    yield section("Evaluation", *score_tables(subject.evaluations), level=3)
    if subject.model is not None and weights:
        layers = measure_layers(subject.model, progress)
        yield section("Similarity of the experts", *similarity_pictures(layers, title), level=3)
    lineage = [subject.sweep_entry] if subject.sweep_entry is not None else []
    lineage += list(subject.model.lineage) if subject.model is not None else []
    yield section("How it was made", lineage_steps(lineage), level=3)
