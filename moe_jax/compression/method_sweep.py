"""Quality against bytes: compresses a model by many methods, and scores and removes every result."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_jax.compression.methods.interface import Method
from moe_jax.compression.report import Point, Sweep
from moe_jax.compression.stream import compress
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.processes import first_decides
from moe_jax.figures.plots import DrawnTo, ink, new_figure
from moe_jax.files.staging import check_target, staged_directory
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.model_io.model_source import ModelSource

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vPX*<>"
_COLORS = 10
# From this ratio of perplexities on, a linear axis shows nothing but the worst point.
_LOG_FROM = 3.0
# What is this many times worse is drawn at the edge: one ruined model would press all others onto a line.
_CUT_FROM = 10.0


def plot_sweep(sweep: Sweep, file: DrawnTo, *, title: str) -> None:
    """Draws perplexity and error over the bytes of the experts: a line per method, and the original model.

    The values of the varied option are in the legend: labels at the points would cover each other.
    """
    unit, name = _unit(sweep.expert_bytes)
    methods: dict[str, list[Point]] = {}
    for point in sorted(sweep.points, key=lambda point: point.expert_bytes):
        methods.setdefault(point.method, []).append(point)
    figure = new_figure(12, 5.2 + 0.2 * (len(methods) // 2))
    left, right = figure.subplots(1, 2)
    left.axhline(sweep.perplexity, color=ink(), linestyle=":", linewidth=1)
    label = f"not compressed: perplexity {sweep.perplexity:.4g}"
    whole, edge = sweep.expert_bytes / unit, _CUT_FROM * sweep.perplexity
    star = {"marker": "*", "color": ink(), "markersize": 11}
    left.plot([whole], [sweep.perplexity], linestyle=":", linewidth=1, label=label, **star)
    right.plot([whole], [0.0], clip_on=False, **star)
    for index, method in enumerate(dict.fromkeys(point.method for point in sweep.points)):
        points = methods[method]
        x = [point.expert_bytes / unit for point in points]
        style = {
            "marker": _MARKERS[index % len(_MARKERS)],
            "color": f"C{index % _COLORS}",
            "linestyle": "-" if index < _COLORS else "--",
            "markersize": 6,
            "markerfacecolor": "none",  # so that points of several methods in one place are seen
            "markeredgewidth": 1.5,
        }
        values = ", ".join(f"{point.value:g}" for point in points)
        beyond = [point.expert_bytes / unit for point in points if point.perplexity > edge]
        cut = f" ({len(beyond)} above the picture)" if beyond else ""
        label = f"{method}: {points[0].option} {values}{cut}"
        left.plot(x, [point.perplexity for point in points], label=label, **style)
        left.plot(beyond, [edge] * len(beyond), "^", color=style["color"], markersize=9, clip_on=False)
        right.plot(x, [point.relative_error for point in points], **style)
    if max(point.perplexity for point in sweep.points) > _LOG_FROM * sweep.perplexity:
        _logarithmic(left)
    left.set_ylabel("perplexity" + (", logarithmic" if left.get_yscale() == "log" else ""))
    right.set_ylabel("relative error of the experts, ||W^ - W|| / ||W||")
    right.set_ylim(bottom=0)
    percent = sweep.expert_bytes / unit / 100
    for axes in (left, right):
        axes.margins(y=0.08)
        if axes is left and max(point.perplexity for point in sweep.points) > edge:
            within = [sweep.perplexity, *(point.perplexity for point in sweep.points if point.perplexity <= edge)]
            axes.set_ylim(min(within) / 1.1, edge)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"experts on the disk, everything included, {name}")
        top = axes.secondary_xaxis("top", functions=(lambda x: x / percent, lambda x: x * percent))
        top.set_xlabel("% of the experts as they were")
        axes.grid(alpha=0.3)
    figure.suptitle(f"Quality against bytes: {title}", fontsize=11, parse_math=False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(file, dpi=130)


def _logarithmic(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _unit(count: int) -> tuple[float, str]:
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return size, name
    return 1.0, "bytes"


Score = Callable[[ModelSource], float]
"""Returns the mean negative log-likelihood per token of a text, natural log; not finite for a ruined model."""
WORST_NLL = math.log(1e30)
"""Largest value of a point, and the value of a ruined model: it must still fit a picture."""


def sweep(
    source: ModelSource,
    dst: Path,
    methods: Sequence[tuple[str, Method]],
    score: Score,
    *,
    described: Mapping[str, Any],
    sources: Sequence[ModelSource | Path],
    progress: Progress = no_progress,
    **options: Any,
) -> Sweep:
    """Writes a folder with `sweep.json` and `sweep.png`. Several processes compress and score together.

    Args:
      source: the model.
      dst: the folder, which appears when all is done.
      methods: methods to try, by name; those of one name differ in the option that is varied.
      score: see `Score`.
      described, sources: the options as the user gave them, and the models and the text that were read.
      progress: called at the start and after every model.
      **options: of `compress`: base, extended, layers, calibration.

    Raises:
      InputError: see `compress`, or the model itself has no finite score. Nothing is left behind.
    """
    first_decides(lambda: check_target(dst))
    nll = score(source)
    if not math.isfinite(nll):
        raise InputError(f"the perplexity of the model itself is not finite (nll {nll}): there is nothing to compare")
    points: list[Point] = []
    warnings: dict[str, None] = {}
    progress("compressing and scoring", 0, len(methods))
    with _staged(dst) as folder:
        for done, (name, method) in enumerate(methods, start=1):
            report = compress(source, folder / "model", method, described={}, **options)
            warnings |= dict.fromkeys(report.warnings)
            option, found = method.swept[0], score(ModelDirectory(folder / "model"))
            found = min(found, WORST_NLL) if math.isfinite(found) else WORST_NLL
            first_decides(lambda: as_path(folder / "model").remove_tree())
            points.append(
                Point(
                    method=name,
                    option=option,
                    value=getattr(method, option),
                    expert_bytes=report.expert_bytes_after,
                    kept=report.expert_bytes_after / report.expert_bytes_before,
                    relative_error=sum(layer.relative_error for layer in report.layers) / len(report.layers),
                    nll=found,
                    perplexity=math.exp(found),
                )
            )
            progress("compressing and scoring", done, len(methods))
        result = Sweep(
            nll=nll,
            perplexity=math.exp(min(nll, WORST_NLL)),
            expert_bytes=report.expert_bytes_before,
            points=tuple(points),
            warnings=tuple(warnings),
        )
        entry = new_lineage_entry("compress --sweep", described, sources, dataclasses.asdict(result))

        def write() -> None:
            as_path(folder / "sweep.json").write_durably(json.dumps(entry, indent=2).encode())
            plot_sweep(result, folder / "sweep.png", title=str(source.path))

        first_decides(write)
    return result


@contextlib.contextmanager
def _staged(dst: Path) -> Iterator[Path]:
    """As `staged_directory`, for several processes: the first makes the folder, and moves it to its place."""
    with contextlib.ExitStack() as stack:
        folder = first_decides(lambda: str(stack.enter_context(staged_directory(dst))))
        yield Path(folder)
        first_decides(stack.close)
