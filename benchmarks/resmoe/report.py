"""The report, made from the results alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from evidence.tables import markdown
from quality.spread import mean, mean_and_spread
from resmoe.findings import byte_findings, check_findings, error_findings, refit_findings
from resmoe.plots import plot_bytes, plot_curves
from resmoe.results import Results
from resmoe.settings import ORIGINS, SCORED_TOKENS
from resmoe.summary import (
    USEFUL,
    Point,
    bits_per_weight,
    errors,
    frontier,
    left_beside_centre,
    perplexities,
    perplexity,
    points,
    reductions,
    seeds_of,
    uncompressed_perplexity,
    within,
)
from resmoe.variants import BASELINE, FAMILIES, KEEPS, MAIN_KEEP, MERGED_KEEPS, PLAIN, VARIANTS, refit_pairs

_NAME = "resmoe_quality"


def write_report(results: Results, out: Path) -> str:
    """Writes `resmoe_quality.md` and the plots; returns the Markdown."""
    text = report(results)
    (out / f"{_NAME}.md").write_text(text)
    drawn = [origin for origin in _large(results) if results.get("compression", origin)]
    if drawn:
        plot_curves(results, drawn, out / f"{_NAME}_curve.png")
        plot_bytes(results, drawn, out / f"{_NAME}_bytes.png")
    return text


def report(results: Results) -> str:
    """The Markdown."""
    large = _large(results)
    every = [name for name in ORIGINS if seeds_of(results, name)]
    sections = [
        _models(results, every),
        _main_table(results, large),
        _refit_table(results, every),
        *(_curve_table(results, origin) for origin in large),
        _byte_table(results, large),
        _checks(results, every),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _large(results: Results) -> list[str]:
    return [origin.name for origin in ORIGINS.values() if origin.num_experts == 8 and seeds_of(results, origin.name)]


def _models(results: Results, origins: Sequence[str]) -> str:
    if not origins:
        return ""
    rows = []
    for origin in origins:
        models = list(results.get("models", origin).values())
        cosines, matched = ([value for model in models for value in model[key]] for key in ("cosine", "matched_cosine"))
        cells = [
            _perplexity(perplexity(model["loss"]) for model in models),
            mean_and_spread(cosines, ".3f"),
            mean_and_spread(matched, ".3f"),
            mean_and_spread((100 * share for share in left_beside_centre(results, origin)), ".1f"),
        ]
        rows.append([origin, *cells])
    settings, seeds = results.settings, len(seeds_of(results, origins[0]))
    note = (
        f"stories260K's shape (5 layers, width 64, FFN 172), top-{settings.top_k}, tuned to TinyShakespeare in "
        f"float32, stored in bfloat16; {seeds} seeds. `upcycled`: from copies of stories260K's FFNs, "
        f"{settings.upcycled_steps} steps; `random`: from new weights, {settings.random_steps} steps. e8, e4: experts "
        f"per layer. Perplexity is of {SCORED_TOKENS:,} held-out tokens, ± the standard deviation over seeds. Cosines "
        "are means over pairs of experts, ± over layers and seeds. The last column is the objective of the barycenter "
        "in parts of the experts' squared norm."
    )
    head = ["models", "perplexity", "cosine of two experts", "neurons matched", "left beside the centre, %"]
    return _section("Models", head, rows, note)


def _main_table(results: Results, origins: Sequence[str]) -> str:
    rows = []
    for name, variant in VARIANTS.items():
        value = variant.main_value
        if value is None:
            continue
        cells = []
        for origin in origins:
            bits = [bits_per_weight(results, origin, name, value)] if perplexities(results, origin, name, value) else []
            cells += [
                mean_and_spread(errors(results, origin, name, value).values(), ".4f"),
                _perplexity(perplexities(results, origin, name, value).values()),
                mean_and_spread(bits, ".2f"),
            ]
        if any(cells):
            rows.append([name, *cells])
    if not rows:
        return ""
    uncompressed = []
    for origin in origins:
        losses = (perplexity(model["loss"]) for model in results.get("models", origin).values())
        uncompressed += ["0", _perplexity(losses), "16"]
    head = ["method", *(f"{origin}: {what}" for origin in origins for what in ("eps/f", "perplexity", "bits/weight"))]
    note = (
        f"Keep {MAIN_KEEP:g}: a quarter of the entries, the rank that takes as much, a quarter of the neurons or of "
        "the experts, or 4 of 16 bits. As in the paper the centre is not counted in it; bits/weight counts every byte "
        "of the experts on the disk, centre, places and scales included. eps/f is the mean squared distance of an "
        "expert from what it became, per neuron, mean over layers (ResMoE, arXiv 2503.06881)."
    )
    section = _section(f"Equal kept share, {MAIN_KEEP:.0%}", head, [["uncompressed", *uncompressed], *rows], note)
    return f"{section}\n\n{error_findings(results, origins)}".rstrip()


def _refit_table(results: Results, origins: Sequence[str]) -> str:
    rows = []
    for origin in origins:
        for pair, (refitted, published) in refit_pairs().items():
            after, before = (errors(results, origin, name, MAIN_KEEP) for name in (refitted, published))
            lower = reductions(after, before)
            if lower:
                quality = (perplexities(results, origin, name, MAIN_KEEP).values() for name in (published, refitted))
                rows.append(
                    [
                        origin,
                        pair,
                        mean_and_spread(before.values(), ".4f"),
                        mean_and_spread(after.values(), ".4f"),
                        mean_and_spread((100 * value for value in lower), ".1f"),
                        *(_perplexity(values) for values in quality),
                    ]
                )
    if not rows:
        return ""
    head = ["models", "residuals UP", "eps/f as published", "eps/f refitted", "lower by, %", "perplexity", "refitted"]
    section = _section(f"Refit of the centre, keep {MAIN_KEEP:g}", head, rows, "The bytes are the same.")
    return f"{section}\n\n{refit_findings(results, origins)}"


def _curve_table(results: Results, origin: str) -> str:
    keeps = sorted({*KEEPS, *MERGED_KEEPS})
    rows = []
    for name, variant in VARIANTS.items():
        if not variant.curve or not any(perplexities(results, origin, name, keep) for keep in keeps):
            continue
        cells = []
        for keep in keeps:
            error = mean(errors(results, origin, name, keep).values(), ".3f") or "-"
            quality = mean(perplexities(results, origin, name, keep).values(), ".4g")
            cells.append(f"{error} / {quality}" if quality else "")
        rows.append([name, *cells])
    if not rows:
        return ""
    head = ["eps/f / perplexity", *(f"keep {keep:g}" for keep in keeps)]
    return _section(f"Kept share from {keeps[0]:g} to {keeps[-1]:g}: {origin}", head, rows, "Means over seeds.")


def _byte_table(results: Results, origins: Sequence[str]) -> str:
    sections = []
    for origin in origins:
        found = list(points(results, origin))
        plain = [point for point in found if VARIANTS[point.name].family == PLAIN]
        rows = [
            [f"{budget.bits:.2f}", *(_cell(within(found, family, budget.bits)) for family in FAMILIES)]
            for budget in sorted(plain, key=lambda point: -point.bits)
        ]
        if not rows:
            continue
        worst = USEFUL * uncompressed_perplexity(results, origin)
        best = [point for point in frontier(found) if point.mean <= worst]
        note = "Each with less error than all that are smaller, from few to many bits: " + "; ".join(
            f"{point.label} ({point.bits:.2f} bits, {point.mean:.4g})" for point in best
        )
        head = ["bits/weight", *(f"best {family}" if family == BASELINE else family for family in FAMILIES)]
        section = _section(f"Equal bytes on the disk: {origin}", head, rows, f"{note}.")
        sections.append(f"{section}\n\n{byte_findings(found)}")
    if sections:
        sections.append(
            "Budgets are what plain quantisation takes. In a cell stands, of all of the family that was tried and "
            "fits, what has the least error of the experts (eps/f of what is stored, neurons matched); the text that "
            f"is scored has no part in the choice. Of the {BASELINE}s (the pruned, factorised and merged experts of "
            "the table above) it is what has the lowest perplexity on that text, a choice in their favour."
        )
    return "\n\n".join(sections)


def _checks(results: Results, origins: Sequence[str]) -> str:
    found = check_findings(results, origins)
    return f"## Checks\n\n{found}" if found else ""


def _cell(point: Point | None) -> str:
    if point is None:
        return "none fits"
    return f"{_perplexity(point.perplexities)} ({point.label}; {point.bits:.2f})"


def _perplexity(values: Iterable[float]) -> str:
    values = list(values)
    # Three digits of a model that is destroyed say enough.
    return mean_and_spread(values, ".3f" if max(values, default=0) < 1000 else ".3g")


def _section(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], note: str) -> str:
    return f"## {title}\n\n{markdown(head, rows)}\n\n{note}"
