"""The report: a page with what is known of its subjects."""

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

import moe_jax
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.files.staging import check_beside, check_target
from moe_jax.files.storage_path import as_path
from moe_jax.report.bytes_and_errors import compression_tables, sweep_pictures
from moe_jax.report.comparison import side_by_side_table
from moe_jax.report.describe_model import Sizes, lineage_steps, model_facts, sizes_of
from moe_jax.report.elements import html_page, joined, note, section
from moe_jax.report.evaluation_files import score_tables
from moe_jax.report.expert_pictures import measure_layers, measured_pictures, similarity_pictures
from moe_jax.report.run_curves import recipe_text, training_curves, training_facts, use_of_experts
from moe_jax.report.subjects import Subject, named, open_subject, with_evaluations

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
        of_subject = list(_parts(subject, size, weights, progress))
        sections.append(section(subject.name, note(_kind_and_place(subject)), *of_subject, id_=f"subject-{number}"))
        contents.append((f"subject-{number}", subject.name))
    names = ", ".join(subject.name for subject in subjects) if len(subjects) < 4 else f"{len(subjects)} subjects"
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    subtitle = f"made by moe-jax {moe_jax.__version__} on {now}"
    return html_page(f"Report: {names}", compared, joined(*sections), subtitle=subtitle, contents=contents)


def _parts(subject: Subject, sizes: Sizes | None, weights: bool, progress: Progress) -> Iterator[Markup]:
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


def _kind_and_place(subject: Subject) -> str:
    model = subject.evaluations[0].model if subject.model is None and subject.evaluations else None
    return f"{subject.kind}{'' if model is None else f' of {model}'}: {subject.path}"
