"""Two pictures: held-out loss by parameters added, and what compression adds to it."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ders.results import Results
from ders.settings import BASES, BITS, DENSE, DROPS, FROZEN, KINDS, NO_DELTAS, VANILLA
from ders.summary import added_losses, added_params, difference, losses
from quality.spread import spread

_FAMILIES = {"DeRS-LM": ("C0", "o"), "DeRS-SM": ("C1", "s")}
_BASE_COLORS = dict(zip(BASES, ("C0", "C1"), strict=True))


def plot_training(results: Results, file: Path) -> None:
    """Held-out loss against that of the dense model of the same seed, by parameters added."""
    dense, vanilla = losses(results, DENSE), losses(results, VANILLA)
    figure, axes = _figure(1)
    for family, (color, marker) in _FAMILIES.items():
        for frozen, style in (("", "-"), (FROZEN, "--")):
            kinds = [kind for kind in KINDS if kind.startswith(family) and kind.endswith(FROZEN) == bool(frozen)]
            points = sorted(
                (added_params(results, kind), difference(losses(results, kind), dense), kind)
                for kind in kinds
                if losses(results, kind)
            )
            if not points:
                continue
            _error_bars(axes[0], [x for x, _, _ in points], [y for _, y, _ in points], color, marker, style,
                        label=family + frozen)  # fmt: skip
            if not frozen:
                for x, y, kind in points:
                    text = kind.removeprefix(family).strip()
                    place = {"xytext": (0, -22 if family == "DeRS-LM" else 16), "textcoords": "offset points"}
                    axes[0].annotate(text, (x, statistics.mean(y)), color=color, ha="center", fontsize=8, **place)
    if vanilla:
        y = difference(vanilla, dense)
        _error_bars(axes[0], [added_params(results, VANILLA)], [y], "black", "D", "-", label="vanilla")
    axes[0].axhline(0, color="black", linestyle=":", linewidth=1, label="dense")
    axes[0].set_xscale("log")
    axes[0].set_xlabel("parameters added to the dense model")
    axes[0].set_ylabel("held-out loss less that of the dense model, nats per token")
    axes[0].set_title(f"stories260K tuned to TinyShakespeare, {len(dense)} seeds", fontsize=10)
    axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


def plot_compression(results: Results, file: Path) -> None:
    """Loss that compression adds, by drop rate and by bits."""
    figure, (drops, bits) = _figure(2)
    drops.set_yscale("symlog", linthresh=1e-3)
    for base, color in _BASE_COLORS.items():
        for method, style, marker in (("drop", "-", "o"), ("drop, largest kept", "--", "s")):
            values = [value for value in DROPS if added_losses(results, base, method, value)]
            label = f"{'random' if method == 'drop' else 'largest kept'}, base: {base}"
            y = [added_losses(results, base, method, value) for value in values]
            _error_bars(drops, list(map(float, values)), y, color, marker, style, label=label)
        values = [value for value in BITS if added_losses(results, base, "bits", value)]
        y = [added_losses(results, base, "bits", value) for value in values]
        _error_bars(bits, [BITS.index(value) for value in values], y, color, "o", "-", label=f"base: {base}")
        nothing = added_losses(results, base, NO_DELTAS, "")
        for axes in (drops, bits) if nothing else ():
            label = f"no deltas, base: {base}"
            axes.axhline(statistics.mean(nothing), color=color, linestyle=":", linewidth=1, label=label)
    vanilla, dense = losses(results, VANILLA), losses(results, DENSE)
    gain = statistics.mean(difference(dense, vanilla)) if dense and vanilla else None
    for axes in (drops, bits):
        axes.axhline(0, color="black", linewidth=1)
        if gain is not None:
            axes.axhline(gain, color="grey", linestyle="-.", linewidth=1, label="dense, trained as long")
        # Below: the lines fill the panels.
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    drops.set_xlabel("share of the entries of every delta left out")
    bits.set_xticks(range(len(BITS)), BITS)
    bits.set_xlabel("bits of an entry of a delta")
    drops.set_ylabel("added held-out loss, nats per token")
    figure.suptitle("DeRS compression of the trained vanilla MoE", fontsize=10)
    figure.savefig(file, dpi=110)


def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    # Not pyplot: it has global state, and picks a backend that may need a screen.
    figure = Figure(figsize=(7, 4.6) if panels == 1 else (11, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    for one in axes:
        one.grid(alpha=0.3)
    return figure, axes


def _error_bars(
    axes: Axes, x: Sequence[float], y: Sequence[Sequence[float]], color: str, marker: str, style: str, *, label: str
) -> None:
    """Mean and standard deviation over seeds."""
    means, deviations = [statistics.mean(values) for values in y], [spread(values) for values in y]
    axes.errorbar(
        x, means, deviations, color=color, marker=marker, linestyle=style, markersize=4, capsize=3, label=label
    )
