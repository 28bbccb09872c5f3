"""What must hold of every run, read from the results."""

from collections.abc import Iterator
from typing import Any

from tuning.kinds import KINDS, NONE, QLORA
from tuning.results import Results
from tuning.variants import R, variants


def check_findings(results: Results) -> str:
    """Whether models start as what they were made of, auxiliary losses are there, and learning rates lie inside."""
    lines = []
    for part in ("upcycled", "tuned"):
        lines += [*_starts(results, part), *_auxiliary(results, part), *_rates(results, part)]
    return "\n".join(f"- {line}" for line in [*lines, *_coverage(results)])


def _coverage(results: Results) -> list[str]:
    """How many of the variants there are results of."""
    every = variants(results.settings)
    return [
        f"tuned: {sum(variant.name in by_name for variant in every)} of {len(every)} variants were run on {text}."
        for text, by_name in (results.get("tuned") or {}).items()
    ]


def _starts(results: Results, part: str) -> list[str]:
    gaps = []
    for text in results.get(part) or {}:
        # A model over an NF4 base does not start as the model in float32.
        starts = [
            run["start_validation_loss"]
            for name, run in _runs(results, part, text)
            if "start_validation_loss" in run and not (name in KINDS and KINDS[name].rest == QLORA)
        ]
        gaps += [max(starts) - min(starts)] if starts else []
    if not gaps:
        return []
    largest = f"{max(gaps):.1g} nats"
    return [f"{part}: before training, the losses of all that start from the same model differ by at most {largest}."]


def _auxiliary(results: Results, part: str) -> list[str]:
    """The least of what the routers' losses add at the first and the last step; of PERFT-R a layer has two routers."""
    found: dict[str, list[float]] = {}
    for text in results.get(part) or {}:
        for name, run in _runs(results, part, text):
            if name not in KINDS or KINDS[name].experts != NONE:
                found.setdefault("with two routers per layer" if name.startswith(R) else "", []).extend(
                    run["auxiliary"]
                )
    return [
        f"{part}: the auxiliary losses of the routers add at least {min(added):.4f} to the training loss {who}".rstrip()
        + f", at most {max(added):.4f}."
        for who, added in sorted(found.items())
    ]


def _rates(results: Results, part: str) -> list[str]:
    """Where a better learning rate may lie beyond those that were tried."""
    lines = []
    for name, tried in (results.get("rates", part) or {}).items():
        rates = sorted(map(float, tried["validation_loss"]))
        if tried["chosen"] in (rates[0], rates[-1]):
            edge = "highest" if tried["chosen"] == rates[-1] else "lowest"
            lines.append(f"{part}, {name}: the best learning rate is the {edge} that was tried, {tried['chosen']:g}.")
    return lines


def _runs(results: Results, part: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, by_seed in results.get(part, text).items():
        for run in by_seed.values():
            yield name, run
