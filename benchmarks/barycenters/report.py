"""The tables, made from the results alone."""

import statistics
from pathlib import Path
from typing import Any

# From so many points on the ratio of times is what is asked for.
_LARGE = 1024


def write_report(results: dict[str, Any], file: Path) -> str:
    """Writes the Markdown, and returns it."""
    text = "\n\n".join([_sets_table(results), _ratios(results), _ott_lines(results)]) + "\n"
    file.write_text(text)
    return text


def _sets_table(results: dict[str, Any]) -> str:
    solvers = results["solvers"]
    head = "| set | E | n | D | POT | s |" + "".join(f" {solver} | s | ratio |" for solver in solvers)
    rows = [head, "|---|" + "---|" * (5 + 3 * len(solvers))]
    for row in results["sets"]:
        cells = [row["set"], row["E"], row["n"], row["D"], f"{row['POT']['objective']:.6g}"]
        cells.append(f"{row['POT']['seconds']:.2f}")
        for solver in solvers:
            figures = row[solver]
            cells += [f"{figures['difference']:+.2%}", f"{figures['seconds']:.2f}", f"{figures['ratio']:.1f}"]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def _ratios(results: dict[str, Any]) -> str:
    """Worst objective of every solver, and its speed at many points."""
    lines = []
    large = [row for row in results["sets"] if row["n"] >= _LARGE]
    for solver in results["solvers"]:
        worst = max(row[solver]["difference"] for row in results["sets"])
        line = f"- {solver}: objective at most {worst:+.1e} from POT's ({len(results['sets'])} sets)"
        if large:
            ratios = [row[solver]["ratio"] for row in large]
            line += (
                f"; POT's time divided by its own at n >= {_LARGE}: median {statistics.median(ratios):.1f}, "
                f"least {min(ratios):.1f} ({len(large)} sets)"
            )
        lines.append(line + ".")
    return "\n".join(lines)


def _ott_lines(results: dict[str, Any]) -> str:
    figures = results["ott"]
    ott, ours, memory = figures["OTT"], figures["auto"], results["memory"]
    return (
        f"OTT's FreeWassersteinBarycenter, {figures['E']} Gaussian clouds, n {figures['n']}, D {figures['D']}: "
        f"objective {ott['objective']:.6g} in {ott['seconds']:.1f} s with {ott['temporaries'] / 1e6:.0f} MB of "
        f"temporaries; `auto`: {ours['objective']:.6g} in {ours['seconds']:.1f} s.\n\n"
        f"Temporaries of compiled programs for one Mixtral layer: OTT {memory['OTT'] / 1e9:.1f} GB, one transport of "
        f"annealing {memory['annealing'] / 1e9:.1f} GB."
    )
