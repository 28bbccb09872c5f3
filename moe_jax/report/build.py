"""The report: a page with what is known of its subjects, and several of them side by side."""

import datetime
import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from markupsafe import Markup

import moe_jax
from moe_jax.core.formatting import show_bytes
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.figures import measure_layers
from moe_jax.figures.plots import Curve, layers_over_time, plot_curves, plot_load, plot_use_over_time
from moe_jax.files.staging import check_beside, check_target
from moe_jax.files.storage_path import as_path
from moe_jax.report import elements as html
from moe_jax.report.model_sections import (
    Sizes,
    compression_tables,
    experts_in_words,
    last_compression,
    lineage_step,
    measured_pictures,
    model_facts,
    similarity_pictures,
    sizes_of,
    sweep_pictures,
)
from moe_jax.report.subjects import Evaluation, Run, Score, Subject, is_number, named, open_subject, with_evaluations
from moe_jax.training.metrics import EVAL_LOSS_BEFORE, Record

if TYPE_CHECKING:
    from moe_jax.models import ModelConfig

# Of the steps, the share at the end over which the use of experts is averaged.
_END = 0.1

# Curves that are drawn: title, label of the axis, and keys of the records by what they are called.
_KINDS = (
    ("Loss", "nats per token", {"training": "loss", "held out": "eval_loss", "from the teacher": "distill_loss"}),
    ("Learning rate", "learning rate", {"learning rate": "learning_rate"}),
    ("Norm of the gradient", "norm", {"norm of the gradient": "grad_norm"}),
    ("Speed", "tokens per second", {"tokens per second": "tokens_per_second"}),
    ("Model FLOP utilisation", "share of the peak", {"MFU": "mfu"}),
    ("Losses of the routers", "mean over layers", {"balance": "balance_loss", "z": "z_loss", "cv": "cv_loss"}),
    ("Losses of the adapters' routers", "mean over layers", {"balance": "perft_balance_loss", "z": "perft_z_loss"}),
)

_ORDER = (
    "what it is",
    "parameters",
    "active per token",
    "of its own",
    "weights on the disk",
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
    return [html.table("What each of them is and does", columns, rows, class_="compared"), overlaid_losses(runs)]


def _figures(subject: Subject, sizes: Sizes | None) -> dict[str, html.Cell]:
    figures: dict[str, html.Cell] = {"what it is": subject.kind}
    if subject.model is not None and sizes is not None:
        figures["parameters"] = f"{sizes.parameters:,}"
        figures["active per token"] = f"{sizes.active:,}"
        if sizes.own is not None:
            figures["of its own"] = f"{sizes.own:,}"
        figures["weights on the disk"] = show_bytes(sizes.stored)
        figures["experts"] = html.lines(experts_in_words(subject.model.config)) or "none"
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
            title = f"{score.task}: {score.metric}"
            if title in figures:  # the same task, evaluated in another way
                title += f" ({evaluation.path.name})"
            figures[title] = html.with_spread(value_of(score), spread_of(score))
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
    """Writes one HTML file about models, runs, sweeps and evaluations; returns its bytes.

    Args:
      paths: of the subjects, at least one; see `open_subject`.
      out: the file, which must not exist, nor lie inside one of the paths. It appears when it is complete.
      base: see `open_subject`.
      weights: whether the weights of models are read, to compare their experts, one matrix of a layer at a time.
      progress: called as layers are compared.

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
    compared = html.section("Side by side", *side_by_side_table(subjects, sizes), id_=_COMPARED)
    contents = [(_COMPARED, "Side by side")] if compared else []
    sections = []
    for number, (subject, size) in enumerate(zip(subjects, sizes, strict=True), start=1):
        of_subject = list(_sections(subject, size, weights, progress))
        of = f" of {subject.evaluations[0].model}" if subject.model is None and subject.evaluations else ""
        place = html.note(f"{subject.kind}{of}: {subject.path}")
        sections.append(html.section(subject.name, place, *of_subject, id_=f"subject-{number}"))
        contents.append((f"subject-{number}", subject.name))
    names = ", ".join(subject.name for subject in subjects) if len(subjects) < 4 else f"{len(subjects)} subjects"
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    subtitle = f"made by moe-jax {moe_jax.__version__} on {now}"
    return html.html_page(f"Report: {names}", compared, html.joined(*sections), subtitle=subtitle, contents=contents)


def _sections(subject: Subject, sizes: Sizes | None, weights: bool, progress: Progress) -> Iterator[Markup]:
    """Yields the sections about one subject; empty is what there is nothing to say of."""
    title = subject.name
    if subject.model is not None and sizes is not None:
        yield html.section("The model", model_facts(subject.model, sizes), level=3)
    if subject.run is not None:
        run = subject.run
        recipe = html.folded("the recipe with every key", html.code(run.recipe, "recipe"))
        yield html.section(
            "Training",
            training_facts(run),
            *training_curves(run, None if subject.model is None else subject.model.config),
            recipe,
            level=3,
        )
        yield html.section("Use of the experts in training", *use_of_experts(run, title), level=3)
    if subject.model is not None:
        yield html.section("Compression", *compression_tables(subject.model), level=3)
    if subject.sweep is not None:
        yield html.section("Quality against bytes", *sweep_pictures(subject.sweep, title), level=3)
    if subject.measured is not None:
        yield html.section("Experts", *measured_pictures(subject.measured), level=3)
    yield html.section("Evaluation", *score_tables(subject.evaluations), level=3)
    if subject.model is not None and weights:
        layers = measure_layers(subject.model, progress)
        yield html.section("Similarity of the experts", *similarity_pictures(layers, title), level=3)
    lineage = [subject.sweep_entry] if subject.sweep_entry is not None else []
    lineage += list(subject.model.lineage) if subject.model is not None else []
    yield html.section("How it was made", html.steps(list(map(lineage_step, lineage))), level=3)


# ---- evaluations ------------------------------------------------------------------------------------------------


def score_tables(evaluations: Sequence[Evaluation]) -> list[Markup]:
    """All figures of a model, and the labels of its classifications; nothing without an evaluation."""
    rows = [
        (score.task, score.metric, value_of(score), spread_of(score), "" if score.count is None else f"{score.count:,}")
        for evaluation in evaluations
        for score in evaluation.scores
    ]
    columns = ("task or text", "figure", "value", "standard error, or 95% interval", "examples or tokens")
    tables = [html.table("Figures of every task and text", columns, rows, words=2)]
    for evaluation in evaluations:
        if evaluation.confusion:
            cells = [
                (name, *(f"{count:,}" for count in row))
                for name, row in zip(evaluation.labels, evaluation.confusion, strict=True)
            ]
            titles = ("label", *(f"given {name}" for name in evaluation.labels))
            tables.append(html.table(f"Labels of {evaluation.scores[0].task}, and those given", titles, cells))
    return tables


def value_of(score: Score) -> str:
    """The figure, with as many digits as it deserves."""
    return f"{score.value:,.4f}" if abs(score.value) < 1000 else f"{score.value:,.1f}"


def spread_of(score: Score) -> str:
    """How sure it is."""
    if score.interval is not None:
        return f"{score.interval[0]:.4f} to {score.interval[1]:.4f}"
    return "" if score.error is None else f"± {score.error:.4f}"


# ---- runs -------------------------------------------------------------------------------------------------------


def training_facts(run: Run) -> Markup:
    """The figures that sum a run up."""
    records = run.records
    if not records:
        return Markup()
    losses, held_out = numbers(records, "loss"), numbers(records, "eval_loss")
    tokens = numbers(records, "tokens")
    speed = median_speed(run)
    checkpoints = ", ".join(map(str, run.checkpoints))
    return html.facts(
        {
            "steps": f"{records[-1]['step']:,}",
            "tokens": f"{sum(map(int, tokens.values)):,}" if tokens.steps else None,
            "loss, last": f"{losses.values[-1]:.4f}" if losses.steps else None,
            "held-out loss, before training": f"{held_out.values[0]:.4f}" if held_out.steps[:1] == [0] else None,
            "held-out loss, last": f"{held_out.values[-1]:.4f}" if held_out.steps else None,
            "held-out loss, least": f"{min(held_out.values):.4f}" if held_out.steps else None,
            "tokens/s, median": f"{speed:,.0f}" if speed is not None else None,
            "checkpoints": checkpoints or None,
        }
    )


def training_curves(run: Run, config: "ModelConfig | None" = None) -> list[Markup]:
    """The curves side by side, and what they begin and end with as a table.

    Losses that have the coefficient 0 in the `config` of the model are left out: nothing was trained on them.
    """
    pictures, rows = [], []
    for title, label, keys in _KINDS:
        named = [numbers(run.records, key)._replace(name=name) for name, key in keys.items()]
        counted = zip(named, keys.values(), strict=True)
        named = [found for found, key in counted if found.steps and not _is_ignored(key, config)]
        if not named:
            continue
        pictures.append(html.picture(partial(plot_curves, named, label=label), _in_words(title, named), title))
        for found in named:
            name = title if len(named) == 1 else f"{title}: {found.name}"
            least, greatest = min(found.values), max(found.values)
            rows.append((name, *(f"{value:,.4g}" for value in (found.values[0], found.values[-1], least, greatest))))
    columns = ("curve", "first", "last", "least", "greatest")
    figures = html.table("Curves in figures", columns, rows)
    return [html.side_by_side(*pictures), html.folded("the curves in figures", figures)]


def _is_ignored(key: str, config: "ModelConfig | None") -> bool:
    """Whether a loss of routers counts nowhere in the loss of a model."""
    name = key.removesuffix("_loss")
    if config is None or name.removeprefix("perft_") not in ("balance", "z", "cv") or name == key:
        return False
    moes = [config.moe(i) for i in config.moe_layers]
    owners = [moe.perft for moe in moes] if name.startswith("perft_") else moes
    return not any(getattr(owner, f"{name.removeprefix('perft_')}_coef") for owner in owners if owner is not None)


def overlaid_losses(runs: dict[str, Run]) -> Markup:
    """The losses of several runs in one picture; nothing for fewer than two."""
    curves = [numbers(run.records, "loss")._replace(name=name) for name, run in runs.items()]
    curves = [curve for curve in curves if curve.steps]
    if len(curves) < 2:
        return Markup()
    draw = partial(plot_curves, curves, label="nats per token")
    return html.picture(draw, _in_words("Training loss", curves), "Training loss")


def use_of_experts(run: Run, title: str) -> list[Markup]:
    """How often the experts were chosen: over the steps, and at the end."""
    found: list[Markup] = []
    for key, whose in (("expert_load", "experts"), ("perft_load", "adapters")):
        steps, shares = shares_over_time(run.records, key)
        if not shares:
            continue
        if len(steps) > 1:
            alt = (
                f"heat maps of how often each of the {whose} was chosen, by layer, over {len(steps)} steps; "
                + _spread({layer: share[-1] for layer, share in shares.items()})
            )
            drawn = len(layers_over_time(list(shares)))
            some = f" ({drawn} of {len(shares)} layers)" if drawn < len(shares) else ""
            caption = f"Use of the {whose} over the steps{some}: red is more than an even share, blue is less"
            found.append(html.picture(partial(plot_use_over_time, steps, shares), alt, caption, wide=True))
        last = max(1, math.ceil(_END * len(steps)))
        ends = {layer: share[-last:].mean(axis=0) for layer, share in shares.items()}
        over = "the last step" if last == 1 else f"the last {last} steps"
        draw = partial(plot_load, ends, title=f"{title}: load of the {whose}, {over}")
        caption = f"Use of the {whose} by layer, {over}"
        found.append(html.picture(draw, f"heat map of the use of the {whose}; {_spread(ends)}", caption, wide=True))
    return found


def median_speed(run: Run) -> float | None:
    """Tokens per second: the median, which leaves out the step that compiles."""
    speeds = numbers(run.records, "tokens_per_second").values
    return statistics.median(speeds) if speeds else None


def numbers(records: Sequence[Record], key: str) -> Curve:
    """The finite numbers of a key over the steps; there may be none. Held-out losses begin at step 0 if known."""
    found = [(record["step"], float(record[key])) for record in records if is_number(record.get(key))]
    before: Any = records[0].get(EVAL_LOSS_BEFORE) if records and key == "eval_loss" else None
    if is_number(before):
        found.insert(0, (0, float(before)))
    return Curve(key, [step for step, _ in found], [value for _, value in found])


def shares_over_time(records: Sequence[Record], key: str) -> tuple[list[int], dict[int, Float[np.ndarray, "n E"]]]:
    """Steps, and by layer the shares of the experts at each; only of steps that have all layers, in equal lengths."""
    last = next((record[key] for record in reversed(records) if isinstance(record.get(key), dict)), {})
    shape = {layer: len(shares) for layer, shares in last.items() if isinstance(shares, list) and shares}
    if not shape or not all(layer.isdecimal() for layer in shape):
        return [], {}
    fitting = [record for record in records if _fits(record.get(key), shape)]
    stacked = {int(layer): np.array([record[key][layer] for record in fitting], np.float64) for layer in shape}
    return [record["step"] for record in fitting], stacked if fitting else {}


def _fits(loads: object, shape: dict[str, int]) -> bool:
    return isinstance(loads, dict) and all(
        isinstance(loads.get(layer), list) and len(loads[layer]) == length and all(map(is_number, loads[layer]))
        for layer, length in shape.items()
    )


def _in_words(title: str, curves: Sequence[Curve]) -> str:
    parts = [
        f"{curve.name} from {curve.values[0]:.4g} at step {curve.steps[0]} to {curve.values[-1]:.4g} at step "
        f"{curve.steps[-1]}"
        for curve in curves
    ]
    return f"{title} over the steps: {'; '.join(parts)}"


def _spread(shares: dict[int, np.ndarray]) -> str:
    """Returns a sentence on the experts that are used most and least, with their layers."""
    relative = {layer: share * len(share) for layer, share in shares.items()}
    most = max(relative, key=lambda layer: relative[layer].max())
    least = min(relative, key=lambda layer: relative[layer].min())
    return (
        f"most used is expert {relative[most].argmax()} of layer {most}, {relative[most].max():.2f} times an even "
        f"share; least expert {relative[least].argmin()} of layer {least}, {relative[least].min():.2f} times"
    )
