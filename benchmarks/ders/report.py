"""The report, made from the results alone."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from ders.plots import plot_compression, plot_training
from ders.results import Results
from ders.settings import BASES, BITS, DENSE, DROPS, FROZEN, KINDS, NO_DELTAS, VANILLA
from ders.summary import added_losses, added_params, difference, drop_noise, losses
from quality.spread import mean_and_spread


def write_report(results: Results, out: Path) -> str:
    """Writes `ders_quality.md` and the plots; returns the Markdown."""
    text = report(results)
    (out / "ders_quality.md").write_text(text)
    if losses(results, DENSE):
        plot_training(results, out / "ders_quality_training.png")
    if results.get("compression"):
        plot_compression(results, out / "ders_quality_compression.png")
    return text


def report(results: Results) -> str:
    """The Markdown."""
    sections = {
        "Training": [_training_table(results)],
        "Compression of the trained vanilla model": [_compression_tables(results), _origin_line(results)],
        "What random drops add": [_drop_noise(results)],
    }
    filled = {title: "\n\n".join(filter(None, content)) for title, content in sections.items()}
    return "\n\n".join(f"## {title}\n\n{content}" for title, content in filled.items() if content) + "\n"


def _training_table(results: Results) -> str:
    vanilla = losses(results, VANILLA)
    if not vanilla or not losses(results, DENSE):
        return ""
    rows = [
        "| model | parameters added | held-out loss | against vanilla | base frozen | cost of freezing |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        if kind.endswith(FROZEN) or not losses(results, kind):
            continue
        free, frozen = losses(results, kind), losses(results, kind + FROZEN)
        cells = [
            kind,
            f"{added_params(results, kind):,}",
            mean_and_spread(free.values()),
            "" if kind == VANILLA else _signed(difference(free, vanilla)),
            mean_and_spread(frozen.values()) if frozen else "",
            _signed(difference(frozen, free)) if frozen else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    start = next(iter(results.get("training", DENSE).values()))["start_loss"]
    largest = max(abs(run["start_loss"] - start) for kind in KINDS
                  for run in (results.get("training", kind) or {}).values())  # fmt: skip
    note = (
        f"Held-out loss, nats per token, mean ± standard deviation over {len(vanilla)} seeds; differences are taken "
        f"seed by seed. Before training every model has {start:.4f} (largest difference {largest:.1g}). All have one "
        "learning rate, chosen for the dense model, vanilla and DeRS-LM on the text that is scored; none was chosen "
        "for a frozen base, and what freezing costs at a rate of its own is not known."
    )
    return "\n".join([*rows, "", note])


def _compression_tables(results: Results) -> str:
    if not results.get("compression"):
        return ""
    head = "| compression | bytes of experts | " + " | ".join(f"base: {base}" for base in BASES) + " |"
    rows = [head, "|---|---|" + "---|" * len(BASES)]
    methods = (
        ("drop", DROPS, "drop {}, random"),
        ("drop, largest kept", DROPS, "drop {}, largest kept"),
        ("bits", BITS, "bits: {}"),
        (NO_DELTAS, ("",), "no deltas"),
    )
    for method, values, label in methods:
        for value in values:
            cells = [_signed(added_losses(results, base, method, value)) for base in BASES]
            if any(cells):
                rows.append(f"| {label.format(value)} | {_kept(results, method, value)} | {' | '.join(cells)} |")
    vanilla = {seed: run["loss"] for seed, run in (results.get("compressed") or {}).items()}
    note = (
        "What compression adds to the held-out loss of the trained vanilla model "
        f"({mean_and_spread(vanilla.values())}), seed by seed. Bytes are on disk, in parts of float32 experts."
    )
    return "\n".join([*rows, "", note])


def _origin_line(results: Results) -> str:
    """How near the trained experts are to the bases."""
    parts = []
    for base in BASES:
        runs = [run for run in (results.get("compression", base, "bits", "8") or {}).values()]
        if runs:
            cosines = [cosine for run in runs for cosine in run["cosine_mean"]]
            least = min(cosine for run in runs for cosine in run["cosine_min"])
            parts.append(f"to the {base} {statistics.mean(cosines):.4f} (least {least:.4f})")
    return f"Cosine of the trained vanilla experts {', '.join(parts)}." if parts else ""


def _drop_noise(results: Results) -> str:
    """Whether the size of the deltas explains what random drops cost."""
    rows = []
    for value in DROPS:
        cells = []
        for base in BASES:
            noise, added = drop_noise(results, base, value), added_losses(results, base, "drop", value)
            cells += [f"{noise:.4f}", f"{statistics.mean(added) / noise:.1f}"] if noise and added else ["", ""]
        if any(cells):
            rows.append(f"| {value} | {' | '.join(cells)} |")
    if not rows:
        return ""
    head = "| drop | " + " | ".join(f"base: {base}: noise | added loss / noise" for base in BASES) + " |"
    note = (
        "What random drops with rescaling add to an expert, in parts of its squared norm: p/(1 - p) times the delta's "
        "part, 1 - cos²; and the added loss, in nats, in parts of it."
    )
    return "\n".join([head, "|---" * (1 + 2 * len(BASES)) + "|", *rows, "", note])


def _kept(results: Results, method: str, value: str) -> str:
    runs = [run for base in BASES for run in (results.get("compression", base, method, value) or {}).values()]
    if method == NO_DELTAS:
        return f"{1 / results.settings.num_experts:.0%}"
    shares = [run["expert_bytes_after"] / run["expert_bytes_before"] for run in runs]
    return f"{statistics.mean(shares):.0%}"


def _signed(values: Sequence[float]) -> str:
    return mean_and_spread(values, "+.4f")
