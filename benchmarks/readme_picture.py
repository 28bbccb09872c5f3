"""Draws the picture of the README: what compressed experts of SmolLM2 lose, over their bits per weight.

    python benchmarks/readme_picture.py [--out docs/pictures]

From `benchmarks/results/equal_bytes.json`, which `equal_bytes.py` measures: a line for plain codes, one for GPTQ, and
one for `allocate`; of the first draw of the calibration text, with 95 % intervals over windows of the test texts. OUT
receives `quality-against-bytes.svg`, in colours for a light page and for a dark one, with the digest of all that is
drawn.
"""

import argparse
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FormatStrFormatter

from evidence.equal_bytes.entries import ALLOCATED, GPTQ, RTN, UNCOMPRESSED
from evidence.equal_bytes.points import points
from evidence.equal_bytes.report import opened
from evidence.results import RESULTS, ResultsFile
from evidence.stamp import ROOT
from evidence.studies.summary import difference

MODEL = ("SmolLM2-135M", "vanilla, 4 experts, trained again")
PICTURE = ROOT / "docs" / "pictures" / "quality-against-bytes.svg"
MOST_BYTES = 40_000
LINES = {RTN: "plain codes", GPTQ: "GPTQ", ALLOCATED: "allocate"}
# Colours of a light page, each with that of a dark one: those of reports.
_TEXT, _SOFT, _GRID = "#1c2430", "#5a6675", "#d5dbe3"
_COLOURS = {RTN: "#c4541a", GPTQ: "#0b7d5f", ALLOCATED: "#1f5fa8"}
_DARK = {
    **{_TEXT: "#e4e8ee", _SOFT: "#9aa6b4", _GRID: "#38424e"},
    **{"#c4541a": "#f08c55", "#0b7d5f": "#3fc79f", "#1f5fa8": "#6fb1f0"},
}
_MARKERS = {RTN: "s", GPTQ: "o", ALLOCATED: "D"}


class Drawn(NamedTuple):
    """A point: bits per weight of the experts, and nats per token above the uncompressed model, with an interval."""

    bits: float
    loss: float
    low: float
    high: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=PICTURE.parent, help="folder of the picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / PICTURE.name
    file.write_text(draw(lines(opened(RESULTS))), encoding="utf-8")
    print(f"{file}: {file.stat().st_size:,} bytes")


def lines(results: ResultsFile) -> dict[str, list[Drawn]]:
    """The points of every line, by the family of methods."""
    before = results.get("equal bytes", *MODEL, UNCOMPRESSED)
    found: dict[str, list[Drawn]] = {family: [] for family in LINES}
    for point in points(results, *MODEL):
        if point.entry.family in found and not point.entry.recovered:
            more = difference(point.first, before)
            assert more is not None
            found[point.entry.family].append(Drawn(point.bits, more.mean, more.low, more.high))
    return {family: sorted(drawn) for family, drawn in found.items()}


def digest(drawn: dict[str, list[Drawn]]) -> str:
    """A digest of all that is drawn, and of how."""
    how = [_DARK, LINES, Path(__file__).read_text(encoding="utf-8")]
    return hashlib.sha256(json.dumps([drawn, how], sort_keys=True).encode()).hexdigest()[:16]


def drawn_from(svg: str) -> str | None:
    """The digest that a picture says it was drawn from."""
    found = re.search(r"<desc>results ([0-9a-f]{16})</desc>", svg)
    return found and found[1]


def draw(drawn: dict[str, list[Drawn]]) -> str:
    """The picture as SVG."""
    settings: dict[Any, Any] = {
        **{"svg.hashsalt": "moe_jax", "svg.fonttype": "path", "font.size": 10, "text.color": _TEXT},
        **{"axes.labelcolor": _TEXT, "axes.edgecolor": _SOFT, "xtick.color": _SOFT, "ytick.color": _SOFT},
        **{"grid.color": _GRID, "legend.labelcolor": _TEXT},
    }
    file = io.BytesIO()
    with matplotlib.rc_context(settings):
        figure, axes = plt.subplots(figsize=(6.4, 3.7), layout="constrained")
        for family, some in drawn.items():
            _line(axes, family, some)
        axes.set_yscale("log")
        axes.set_xscale("log", base=2)
        ticks = (1.25, 1.5, 2, 2.5, 3, 4)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.minorticks_off()
        axes.set_xlabel("bits per expert weight, all included (16 before)")
        axes.set_ylabel("loss above the uncompressed,\nnats per token")
        axes.grid(linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
        axes.legend(frameon=False)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", file.getvalue().decode(), flags=re.DOTALL)
    text = re.sub(r"\n\s*|<!--.*?-->", lambda found: "\n" if found[0].strip() == "" else "", text)
    # Nobody sees more digits of a path than these.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]).replace("\n", " "), text)
    return re.sub(r"(<svg [^>]*>)", rf"\1\n{_described(drawn)}\n{_dark_style()}", text, count=1, flags=re.DOTALL)


def _line(axes: Axes, family: str, some: list[Drawn]) -> None:
    losses = [point.loss for point in some]
    errors = [
        [point.loss - max(point.low, 1e-3 * point.loss) for point in some],
        [point.high - point.loss for point in some],
    ]
    style = {"color": _COLOURS[family], "marker": _MARKERS[family], "markersize": 5, "linewidth": 1.8, "capsize": 3}
    axes.errorbar([point.bits for point in some], losses, yerr=errors, elinewidth=1, label=LINES[family], **style)


def _described(drawn: dict[str, list[Drawn]]) -> str:
    best = min(drawn[ALLOCATED], key=lambda point: point.bits)
    return (
        "<title>Loss of compressed experts of SmolLM2-135M above the uncompressed ones, over bits per weight: "
        f"plain codes, GPTQ, and allocate, which loses {best.loss:.3f} nats per token at {best.bits:.2f} bits</title>"
        f"<desc>results {digest(drawn)}</desc>"
    )


def _dark_style() -> str:
    """Colours of a dark page, in the place of those that stand beside every shape."""
    rules = [
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
        for light, dark in _DARK.items()
        for kind in ("stroke", "fill")
    ]
    return f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"


if __name__ == "__main__":
    main()
