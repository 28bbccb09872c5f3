"""What compression cost, as tables, from results alone."""

import statistics
from collections.abc import Iterable, Iterator, Mapping

from evidence.results import ResultsFile
from evidence.studies.summary import BySeed, difference
from evidence.studies.variants import COMPRESSION, FAMILIES, NOISE, PERMUTED, UNCOMPRESSED, VARIANTS, label
from evidence.studies.verdicts import effect
from evidence.tables import markdown

# bfloat16 rounds what a method measured in float32.
_ROUNDING = 1e-3
# Bits per weight: a little more than codes of 2, 3, 4, 5, 6 and 8 bits with their scales.
BUDGETS = (2.3, 3.3, 4.3, 5.3, 6.3, 8.3)
LOWEST = ", lowest"
"""Ends the names of tables of the lowest losses."""


def compression_tables(results: ResultsFile, *, whole: bool = False) -> dict[str, str]:
    """What became of every kept model, by headings; of all, or of those whose whole tables stand on pages.

    These were asked questions, or their experts were permuted.
    """
    return {
        f"{COMPRESSION}, {scale}, {model}": _of_model(found)
        for scale, models in (results.get(COMPRESSION) or {}).items()
        for model, found in models.items()
        if UNCOMPRESSED in found and (not whole or _stands_on_a_page(found))
    }


def _stands_on_a_page(found: Mapping[str, BySeed]) -> bool:
    is_asked = any("answers" in run for run in found[UNCOMPRESSED].values())
    return is_asked or any(True for _ in _in_order(found, PERMUTED))


def frontier_tables(results: ResultsFile) -> dict[str, str]:
    """Of every family the lowest loss that was found within so many bits per weight, by headings.

    The one that is shown was picked by the very loss that is shown: families with more variants have more to pick from.
    """
    found = {}
    for scale, models in (results.get(COMPRESSION) or {}).items():
        for model, variants in models.items():
            if whole := variants.get(UNCOMPRESSED):
                rows = [
                    [f"{most:g}", *(_lowest(variants, whole, family, most) for family in FAMILIES)] for most in BUDGETS
                ]
                head = ("bits per weight at most", *FAMILIES)
                found[f"{COMPRESSION}, {scale}, {model}{LOWEST}"] = markdown(head, rows)
    return found


def _lowest(variants: Mapping[str, BySeed], whole: BySeed, family: str, most: float) -> str:
    candidates = []
    for name, by_seed in _in_order(variants, family):
        bits = [run["bits_per_weight"] for run in by_seed.values() if "bits_per_weight" in run]
        added = difference(by_seed, whole)
        if added is not None and bits and statistics.fmean(bits) <= most:
            candidates.append((added.mean, f"{added.mean:+.4f}, {name} ({statistics.fmean(bits):.2f})"))
    return min(candidates)[1] if candidates else "none"


def noise_tables(results: ResultsFile) -> dict[str, str]:
    """What dropping entries of deltas cost, by headings."""
    head = ("deltas", "energy of deltas", "dropped", "energy of noise", "added loss")
    return {
        f"{NOISE}, {scale}, {model}": markdown(head, _noise_rows(sizes))
        for scale, models in (results.get(NOISE) or {}).items()
        for model, sizes in models.items()
    }


def checks(results: ResultsFile) -> str:
    """What was measured twice: losses of served models, and errors with the neurons matched anew; empty of nothing."""
    found = [
        (name, run)
        for models in (results.get(COMPRESSION) or {}).values()
        for variants in models.values()
        for name, by_seed in variants.items()
        for run in by_seed.values()
    ]
    served = [
        abs(loss - run["losses"][text]) for _, run in found for text, loss in run.get("served_losses", {}).items()
    ]
    lines = []
    if served:
        lines.append(
            "- All models are scored with what their experts became put into the uncompressed one. "
            f"{sum('served_losses' in run for _, run in found)} were also scored as they are served: the losses differ "
            f"by at most {max(served):.1g} nats."
        )
    above: dict[str, float] = {}
    for name, run in found:
        if "least_error_per_neuron" in run and any(run.get("error_per_neuron", ())):
            ratio = sum(run["least_error_per_neuron"]) / sum(run["error_per_neuron"])
            above[name] = max(ratio, above.get(name, 0.0))
    if above:
        others = ", ".join(f"{name} ({ratio:.2f} times)" for name, ratio in above.items() if ratio > 1 + _ROUNDING)
        but = f", but for {others}: their own error is not that of the stored neurons" if others else ""
        lines.append(
            "- eps/f of the stored experts, with the neurons matched anew by SciPy, is at most what the method says"
            f"{but}."
        )
    return "\n".join(lines)


def _of_model(found: Mapping[str, BySeed]) -> str:
    whole = found[UNCOMPRESSED]
    first = next(iter(whole.values()))
    texts, tasks, agrees = list(first["losses"]), list(first.get("answers", {})), "agreement" in first
    head = ["experts", "bits per weight", "added loss", *texts, "eps/f"]
    head += [f"{task}, %" for task in tasks] + (["greedy tokens alike, %", "until the first that differs, %"] * agrees)
    rows = [[UNCOMPRESSED, "16", "", *_cells(whole, whole, texts, tasks, agrees)]]
    for name, by_seed in _in_order(found):
        added = difference(by_seed, whole)
        bits = [run["bits_per_weight"] for run in by_seed.values() if "bits_per_weight" in run]
        size = f"{statistics.fmean(bits):.2f}" if bits else ""
        rows.append([name, size, str(added or ""), *_cells(by_seed, whole, texts, tasks, agrees)])
    return markdown(head, rows)


def _in_order(found: Mapping[str, BySeed], family: str | None = None) -> Iterator[tuple[str, BySeed]]:
    """As the variants, or those of a family, stand there; of each, from few to many."""
    for name, variant in VARIANTS.items():
        for value in sorted(variant.values) if family in (None, variant.family) else ():
            if by_seed := found.get(label(name, value)):
                yield label(name, value), by_seed


def _cells(by_seed: BySeed, whole: BySeed, texts: list[str], tasks: list[str], agrees: bool) -> list[str]:
    runs = by_seed.values()
    cells = [f"{statistics.fmean(run['losses'][text] for run in runs):.4f}" for text in texts]
    errors = [error for run in runs for error in run.get("error_per_neuron", ())]
    cells.append(f"{statistics.fmean(errors):.3g}" if errors else "")
    for task in tasks:
        cells.append(accuracy({seed: (run["answers"][task], whole[seed]["answers"][task])
                                for seed, run in by_seed.items()}))  # fmt: skip
    for share in ("by_position", "until_first") if agrees else ():
        cells.append(f"{100 * statistics.fmean(run['agreement'][share] for run in runs):.1f}")
    return cells


def accuracy(answers: Mapping[str, tuple[str, str]]) -> str:
    """The share that is right, and how much more than of the whole model, question by question."""
    pairs = [(int(one), int(other)) for both in answers.values() for one, other in zip(*both, strict=True)]
    more = effect([100 * (one - other) for one, other in pairs])
    said = f"{100 * statistics.fmean(one for one, _ in pairs):.1f}"
    if more is None or (more.mean == 0 and more.low == more.high):
        return said
    return f"{said} ({more.mean:+.1f} [{more.low:+.1f}, {more.high:+.1f}])"


def _noise_rows(sizes: Mapping[str, BySeed]) -> Iterator[list[str]]:
    for size, by_seed in sizes.items():
        runs = list(by_seed.values())
        for rate in runs[0]["noise"]:
            yield [
                size,
                _mean(run["delta"] for run in runs),
                rate,
                _mean(run["noise"][rate] for run in runs),
                str(effect([run["added"][rate] for run in runs])),
            ]


def _mean(values: Iterable[float]) -> str:
    return f"{statistics.fmean(values):.3g}"
