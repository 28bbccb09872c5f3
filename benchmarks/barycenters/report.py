"""The file of results of `barycenter.py`, and the tables that are made from it alone."""

import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evidence.results import ResultsFile
from evidence.tables import markdown

# From so many points on the ratio of times is what is asked for.
_LARGE = 1024


@dataclasses.dataclass(frozen=True)
class Settings:
    """Results of other solvers are not mixed."""

    solvers: list[str]


class Results(ResultsFile):
    """`sets` by label, `ott` and `memory`."""

    settings_type = Settings


def write_report(results: Results, out: Path) -> str:
    """Writes `barycenter.md`, and returns it."""
    text = report(results)
    (out / "barycenter.md").write_text(text)
    return text


def report(results: Results) -> str:
    """The Markdown."""
    solvers, rows = results.settings.solvers, list(results.get("sets").values())
    large = [row for row in rows if row["n"] >= _LARGE]
    small = [row for row in rows if row["n"] < _LARGE]
    sections = [f"## {_LARGE} points and more\n\n{_sets_table(large, solvers)}"] if large else []
    sections += [f"## Fewer points\n\n{_sets_table(small, solvers)}"] if small else []
    sections += [f"## Findings\n\n{_ratios(rows, large, solvers)}", _ott_lines(results)]
    return "\n\n".join(sections) + "\n"


def _sets_table(rows: Iterable[dict[str, Any]], solvers: Iterable[str]) -> str:
    head = ["set", "E", "n", "D", "POT", "s"]
    for solver in solvers:
        head += [solver, "s", "ratio"]
    table = []
    for row in rows:
        cells = [row["set"], row["E"], row["n"], row["D"], f"{row['POT']['objective']:.6g}"]
        cells.append(f"{row['POT']['seconds']:.2f}")
        for solver in solvers:
            figures = row[solver]
            cells += [f"{figures['difference']:+.2%}", f"{figures['seconds']:.2f}", f"{figures['ratio']:.1f}"]
        table.append([str(cell) for cell in cells])
    return markdown(head, table)


def _ratios(rows: list[dict[str, Any]], large: list[dict[str, Any]], solvers: Iterable[str]) -> str:
    """Worst objective of every solver, and its speed at many points."""
    lines = []
    for solver in solvers:
        worst = max(row[solver]["difference"] for row in rows)
        line = f"- {solver}: objective at most {worst:+.1e} from POT's ({len(rows)} sets)"
        if large:
            ratios = [row[solver]["ratio"] for row in large]
            line += (
                f"; POT's time divided by its own at n >= {_LARGE}: median {statistics.median(ratios):.1f}, "
                f"least {min(ratios):.1f} ({len(large)} sets)"
            )
        lines.append(line + ".")
    return "\n".join(lines)


def _ott_lines(results: Results) -> str:
    figures = results.get("ott")
    ott, ours, memory = figures["OTT"], figures["auto"], results.get("memory")
    return (
        f"OTT's FreeWassersteinBarycenter, {figures['E']} Gaussian clouds, n {figures['n']}, D {figures['D']}: "
        f"objective {ott['objective']:.6g} in {ott['seconds']:.1f} s with {ott['temporaries'] / 1e6:.0f} MB of "
        f"temporaries; `auto`: {ours['objective']:.6g} in {ours['seconds']:.1f} s.\n\n"
        f"Temporaries of compiled programs for one Mixtral layer: OTT {memory['OTT'] / 1e9:.1f} GB, one transport of "
        f"annealing {memory['annealing'] / 1e9:.1f} GB."
    )
