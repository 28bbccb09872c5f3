"""CLAIMS as tables in Markdown: what was trained, and what it says about what papers say."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from evidence.results import ResultsFile
from evidence.studies.claims import CLAIMS
from evidence.studies.claims_file import NAME
from evidence.studies.compression_tables import LOWEST, checks, compression_tables, frontier_tables, noise_tables
from evidence.studies.figures import draw_claims, draw_dense_adapters
from evidence.studies.noise_figure import draw_noise
from evidence.studies.summary import mean_losses, spread
from evidence.studies.variants import NOISE
from evidence.studies.verdicts import AGREES, OPPOSITE, SMALL, UNDECIDED, better, discoveries, effect, paired
from evidence.tables import markdown

TOO_FEW = "not enough seeds"
# Shape that the others of a study are held against.
_REFERENCES = {
    "upcycling": "vanilla",
    "pesc": "LoRA 16",
    "perft": "as it is",
    "perft of many experts": "PERFT-S r=16",
    "pilot": "as it is",
}


def write_report(results: ResultsFile, out: Path) -> str:
    """Writes `claims.md` and the pictures; returns the Markdown."""
    text = report(results)
    (out / f"{NAME}.md").write_text(text)
    if any(found.count > 2 for claim in CLAIMS for _, found in claim.effects(results)):
        draw_claims(results, out / f"{NAME}_effects.png")
    for scale in results.get("perft") or {}:
        draw_dense_adapters(results, scale, out / f"{NAME}_dense_adapters_{scale}.png")
    if results.get(NOISE):
        draw_noise(results, out / f"{NAME}_noise.png")
    return text


def report(results: ResultsFile) -> str:
    """The whole report: the table of claims first, then every study."""
    parts = ["# Claims", "", "## Verdicts", "", claims_table(results)]
    for study in _REFERENCES:
        for scale in results.get(study) or {}:
            parts += ["", f"## {study}, {scale}", "", *study_tables(results, study, scale)]
    for heading, table in (compression_tables(results) | noise_tables(results)).items():
        parts += ["", f"## {heading}", "", table]
    if said := checks(results):
        parts += ["", "## Compression, checks", "", said]
    rates = rates_table(results)
    if rates:
        parts += ["", "## Learning rates", "", rates]
    return "\n".join(parts) + "\n"


def blocks(results: ResultsFile) -> dict[str, str]:
    """The tables of the pages, by the names of their blocks; of compressed models only the lowest losses.

    Of those that were asked questions, or whose experts were permuted, all that was measured.
    """
    found = {"verdicts": claims_table(results), "in short": short_table(results)}
    for study in _REFERENCES:
        for scale in results.get(study) or {}:
            found[f"{study}, {scale}"] = "\n".join(study_tables(results, study, scale)).strip()
    whole = compression_tables(results, whole=True)
    lowest = {name: table for name, table in frontier_tables(results).items() if name.removesuffix(LOWEST) not in whole}
    return found | whole | lowest | noise_tables(results)


def claims_table(results: ResultsFile) -> str:
    """A row for every claim and setting that there are results of."""
    rows = []
    for claim in CLAIMS:
        for setting, found in claim.effects(results):
            verdict = claim.verdict(found, claim.least) if found.count > 2 else TOO_FEW
            count = f"{found.count}" if found.over == "seeds" else f"1, {found.count} {found.over}"
            rows.append((claim.paper, claim.says, setting, str(found), count, f"{claim.least:g}", verdict))
    head = ("paper", "claim", "setting", "effect, nats per token [95 %]", "seeds", "least of interest", "verdict")
    return markdown(head, rows)


def short_table(results: ResultsFile) -> str:
    """A row for every statement: of how many cases and settings each word is the verdict.

    The last column: of the differences that are told, which a false-discovery rate of 5 % over the whole table leaves
    (Benjamini and Hochberg 1995).
    """
    told = [(claim, found) for claim in CLAIMS for _, found in claim.effects(results)]
    stays = dict(zip(map(id, (found for _, found in told)), discoveries([found for _, found in told]), strict=True))
    by_statement: dict[tuple[str, str], list[tuple[str, bool | None]]] = {}
    for claim, found in told:
        word = claim.verdict(found, claim.least) if found.count > 2 else TOO_FEW
        # That something is as good is no difference, so that it cannot be a false one.
        tells = word == OPPOSITE or (word == AGREES and claim.verdict is better)
        by_statement.setdefault((claim.paper, claim.statement), []).append((word, stays[id(found)] if tells else None))
    rows = []
    for (paper, statement), cases in by_statement.items():
        words = [word for word, _ in cases]
        differ = [left for _, left in cases if left is not None]
        counts = (str(words.count(word) or "") for word in (AGREES, SMALL, OPPOSITE, UNDECIDED))
        rows.append((paper, statement, str(len(words)), *counts, f"{sum(differ)} of {len(differ)}" if differ else ""))
    head = ("paper", "claim", "cases", AGREES, SMALL, OPPOSITE, UNDECIDED, "left at 5 % false discoveries")
    return markdown(head, rows)


def study_tables(results: ResultsFile, study: str, scale: str) -> Iterator[str]:
    """A table for every length of runs."""
    for steps, shapes in results.get(study, scale).items():
        reference = mean_losses(shapes.get(_REFERENCES[study], {}))
        rows = []
        texts = texts_of(shapes)
        for shape, every in shapes.items():
            found = {seed: run for seed, run in every.items() if "losses" in run}
            losses, lost = mean_losses(found), len(every) - len(found)
            if not found:
                rows.append((shape, "", "", f"{lost} diverged", *("" for _ in range(1 + len(texts)))))
                continue
            first = next(iter(found.values()))
            against = effect(paired(losses, reference))
            rows.append((
                shape,
                f"{first['trained']:,}",
                f"{statistics.fmean(losses.values()):.4f} ± {spread(losses):.4f}",
                f"{len(losses)}" + (f", {lost} diverged" if lost else ""),
                str(against) if against and shape != _REFERENCES[study] else "",
                *(f"{statistics.fmean(run['losses'][text] for run in found.values()):.4f}" for text in texts),
            ))  # fmt: skip
        head = ("model", "trained", "mean loss", "seeds", f"against {_REFERENCES[study]}", *texts)
        yield f"{steps}:\n\n{markdown(head, rows)}\n"


def texts_of(shapes: dict) -> list[str]:
    """Names of the texts that runs are scored with; none if all diverged."""
    scored = (run["losses"] for found in shapes.values() for run in found.values() if "losses" in run)
    return list(next(scored, ()))


def rates_table(results: ResultsFile) -> str:
    """Of every shape that rates were chosen for, the best that were tried, and how many were."""
    rows = []
    for scale, starts in (results.get("rates") or {}).items():
        for start, lengths in starts.items():
            for steps, shapes in lengths.items():
                for shape, tried in shapes.items():
                    means = {
                        text: statistics.fmean(found["losses"].values())
                        for text, found in tried.items()
                        if "losses" in found
                    }
                    if means:
                        best = min(means, key=means.__getitem__)
                        rows.append((scale, start, shape, steps, best, f"{means[best]:.4f}", str(len(tried))))
    head = ("scale", "start and text", "model", "tried for", "best rates", "selection loss", "tried")
    return markdown(head, rows) if rows else ""
