"""Two pictures: held-out loss by trained parameters (PESC), and by active trained parameters (PERFT)."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from quality.spread import spread
from tuning.kinds import ADAPTERS, COPIES, FROZEN, KINDS, LORA, NONE, QLORA
from tuning.kinds import FULL as REST_FULL
from tuning.results import Results
from tuning.summary import Point, curve, losses, points, runs
from tuning.variants import FULL, LORA_QV, LORA_ROUTER, D, E, R, S

_RESTS = {REST_FULL: "C0", LORA: "C1", QLORA: "C2", FROZEN: "C3"}
_EXPERTS = {NONE: "s", COPIES: "D", ADAPTERS: "o"}
# Colour and marker by family; of PERFT-D one marker for every number of adapters.
_STYLES = {R: ("C0", "o"), E: ("C1", "s"), S: ("C3", "v"), LORA_QV: ("black", "x"), LORA_ROUTER: ("grey", "+")}
_DENSE_MARKERS = {2: "<", 4: "^", 8: ">"}


def plot_upcycled(results: Results, file: Path) -> None:
    """A point for every kind."""
    figure, (axes,) = _figure(1)
    for name, kind in KINDS.items():
        found = losses(results, "upcycled", "shakespeare", name)
        if not found:
            continue
        trained = next(iter(runs(results, "upcycled", "shakespeare", name).values()))["trained_params"]
        y = list(found.values())
        color, marker = _RESTS[kind.rest], _EXPERTS[kind.experts]
        axes.errorbar([trained], [sum(y) / len(y)], [spread(y)], color=color, marker=marker, capsize=3, linestyle="",
                      label=name, fillstyle="none" if kind.adapter == 8 else "full")  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("trained parameters")
    axes.set_ylabel("held-out loss, nats per token")
    axes.set_title("stories260K tuned to TinyShakespeare", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(file, dpi=110)


def plot_tuned(results: Results, domains: Sequence[str], file: Path) -> None:
    """A panel for every domain: the curves of the families over their ranks, and what is not on them."""
    figure, panels = _figure(len(domains))
    for axes, domain in zip(panels, domains, strict=True):
        found = points(results, domain)
        drawn: set[str] = set()

        def line(label: str, family: str, experts: int, color: str, marker: str, style: str = "-") -> None:
            on_it = curve(found, family, experts, results.settings)  # noqa: B023
            drawn.update(point.variant.name for point in on_it)  # noqa: B023
            _error_bars(axes, on_it, color, marker, style, label)  # noqa: B023

        sizes = {R: 8, E: results.settings.num_experts}
        for family, (color, marker) in _STYLES.items():
            label = f"{family} 8/{results.settings.top_k}" if family == R else family
            line(label, family, sizes.get(family, 1), color, marker, "--" if family.startswith("LoRA") else "-")
        for experts, marker in _DENSE_MARKERS.items():
            line(f"{D} {experts}", D, experts, "C2", marker, ":")
        for parallel, label in ((False, "PERFT-R, other M/K, r=8"), (True, "parallel adapters, r=8")):
            rest = [p for p in found if p.active and p.variant.name not in drawn and p.variant.parallel == parallel]
            _others(axes, rest, label, hollow=parallel)
        for point in found:
            if point.variant.family == FULL:
                axes.axhline(point.mean, color="black", linewidth=1, label=FULL)
        axes.set_xscale("log")
        axes.set_xlabel("active trained parameters")
        axes.set_title(domain, fontsize=10)
    panels[0].set_ylabel("held-out loss, nats per token")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle("A trained MoE tuned to another domain", fontsize=11)
    figure.savefig(file, dpi=110)


def _others(axes: Axes, found: Sequence[Point], label: str, *, hollow: bool) -> None:
    for index, point in enumerate(found):
        variant = point.variant
        color = _STYLES.get(variant.family, ("C2", ""))[0]
        axes.plot([point.active], [point.mean], color=color, marker="D", linestyle="", markersize=5,
                  fillstyle="none" if hollow else "full", label=label if index == 0 else None)  # fmt: skip
        if variant.family == R and not hollow:
            text = f"{variant.experts}/{variant.top_k}"
            axes.annotate(text, (point.active, point.mean), xytext=(4, 4), textcoords="offset points", fontsize=7)


def _error_bars(axes: Axes, found: Sequence[Point], color: str, marker: str, style: str, label: str) -> None:
    """Mean and standard deviation over seeds."""
    if found:
        x, y = [point.active for point in found], [point.mean for point in found]
        deviations = [spread(list(point.losses.values())) for point in found]
        axes.errorbar(x, y, deviations, color=color, marker=marker, linestyle=style, markersize=4, capsize=2,
                      linewidth=1.2, label=label)  # fmt: skip


def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    # Not pyplot: it has global state, and picks a backend that may need a screen.
    figure = Figure(figsize=(7.5, 4.6) if panels == 1 else (6 * panels, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for one in axes:
        one.grid(alpha=0.3, which="both")
    return figure, axes
