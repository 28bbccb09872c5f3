"""What the numbers say about what the papers say: compared here, not written beforehand."""

from collections.abc import Sequence

from quality.spread import mean_and_spread
from tuning.kinds import DENSE, DENSE_LORA, VANILLA
from tuning.results import Results
from tuning.summary import Point, compare, curve, difference, losses, points
from tuning.variants import FULL, LORA_QV, LORA_ROUTER, D, E, R, S

AGREES, DISAGREES, UNDECIDED = "agrees with the paper", "**does not agree with the paper**", "undecided between seeds"


def verdict(signed: Sequence[float]) -> str:
    """Whether something is as expected: the differences of all seeds are above zero, below, or of both signs."""
    if all(value > 0 for value in signed):
        return AGREES
    return DISAGREES if all(value < 0 for value in signed) else UNDECIDED


def upcycled_findings(results: Results) -> str:
    """PESC against dense tuning, vanilla upcycling and itself with another rest."""

    def gains(better: str, worse: str) -> list[float]:
        these, those = (losses(results, "upcycled", "shakespeare", name) for name in (worse, better))
        return difference(these, those)

    # PESC (arXiv 2401.02731) compares models of which all but adapters is tuned in the same way.
    claimed = [
        (f"PESC {a}, rest {rest}", dense) for a in (8, 64) for rest, dense in (("full", DENSE), ("LoRA", DENSE_LORA))
    ]
    claimed.append((VANILLA, DENSE))
    others = [(f"PESC 64, rest {rest}", f"PESC 8, rest {rest}") for rest in ("full", "LoRA", "QLoRA", "frozen")]
    others += [(f"PESC {a}, rest LoRA", f"PESC {a}, rest {rest}") for rest in ("QLoRA", "frozen") for a in (8, 64)]
    others += [(f"PESC {a}, rest QLoRA", name) for name in (DENSE, VANILLA) for a in (8, 64)]
    lines = []
    for pair in (*claimed, *others):
        found = gains(*pair)
        if found:
            said = f"- {pair[0]}: {_lower(found)} than {pair[1]}"
            lines.append(f"{said}; {verdict(found)}." if pair in claimed else f"{said}, {_seeds(found)}.")
    return "\n".join(lines)


def tuned_findings(results: Results, text: str) -> str:
    """What PERFT (arXiv 2411.08212) says of its variants, on one text."""
    found, count = points(results, text), results.settings.num_experts
    lines = [*_order(results, found), *_degradation(found), *_sizes(found), *_forms(found)]
    full = [point for point in found if point.variant.family == FULL]
    beside = [point for point in found if point.variant.family != FULL]
    if full and beside:
        best = min(beside, key=lambda point: point.mean)
        gap = mean_and_spread(difference(best.losses, full[0].losses), "+.4f")
        lines.append(
            f"- the lowest loss beside a frozen MoE ({count} experts) is that of {best.variant.name}, {best.mean:.4f} "
            f"with {best.active:,} active parameters: {gap} against full fine-tuning."
        )
    return "\n".join(lines)


def _order(results: Results, found: Sequence[Point]) -> list[str]:
    """R and E above D and S, and all of them above LoRA, at equal active parameters."""
    settings, lines = results.settings, []
    for better, worse, experts in (
        *((ours, theirs, None) for ours in (R, E) for theirs in (S, D)),
        *((ours, LORA_QV, None) for ours in (R, E, S)),
        *((D, LORA_QV, experts) for experts in (2, 4, 8)),
        *((ours, LORA_ROUTER, None) for ours in (R, E, S)),
    ):
        default = {R: 8, E: settings.num_experts}.get(better, 1)
        line = curve(found, better, experts or default, settings)
        others = [point for point in found if point.variant.family == worse and not point.variant.parallel]
        comparison = compare(line, others)
        if comparison is None:
            continue
        name = f"{better} ({experts} adapters)" if experts else better
        lines.append(
            f"- {name} above {worse} at equal active parameters: better at {comparison.won} of {comparison.budgets} "
            f"budgets, loss {_lower(comparison.gains)} on average; {verdict(comparison.gains)}."
        )
    return lines


def _degradation(found: Sequence[Point]) -> list[str]:
    """D gets worse with more adapters and with a larger rank; what a larger rank does to S."""
    dense = {(p.variant.experts, p.variant.rank): p for p in found if p.variant.family == D and not p.variant.parallel}
    lines = []
    for rank in sorted({rank for _, rank in dense}):
        counts = sorted(experts for experts, at in dense if at == rank)
        rises = difference(dense[counts[-1], rank].losses, dense[counts[0], rank].losses)
        lines += _degrades(f"{D} r={rank} degrades from M={counts[0]} to {counts[-1]}", rises)
    for experts in sorted({experts for experts, _ in dense}):
        ranks = sorted(rank for at, rank in dense if at == experts)
        rises = difference(dense[experts, ranks[-1]].losses, dense[experts, ranks[0]].losses)
        lines += _degrades(f"{D} M={experts} degrades from rank {ranks[0]} to {ranks[-1]}", rises)
    single = sorted(
        (p for p in found if p.variant.family == S and not p.variant.parallel), key=lambda point: point.active
    )
    if len(single) > 1:
        change = mean_and_spread(difference(single[-1].losses, single[0].losses), "+.4f")
        ranks = f"{single[0].variant.rank} to {single[-1].variant.rank}"
        lines.append(f"- {S} from rank {ranks}: loss changes by {change}.")
    return lines


def _degrades(what: str, rises: Sequence[float]) -> list[str]:
    """Nothing where there are no two points of a seed, or where both are the same one."""
    if not any(rises):
        return []
    return [f"- {what}: loss changes by {mean_and_spread(rises, '+.4f')}; {verdict(rises)}."]


def _sizes(found: Sequence[Point]) -> list[str]:
    """How many adapters PERFT-R should have and use, at one rank."""
    routed = [p for p in found if p.variant.family == R and p.variant.rank == 8 and not p.variant.parallel]
    if len(routed) < 2:
        return []
    best, worst = (choose(routed, key=lambda point: point.mean) for choose in (min, max))
    gap = mean_and_spread(difference(worst.losses, best.losses), ".4f")
    lines = [f"- of the sizes M/K of {R} at rank 8 {_size(best)} is best and {_size(worst)} worst, {gap} apart."]
    all_used = next((p for p in routed if (p.variant.experts, p.variant.top_k) == (8, 8)), None)
    ungated = next((p for p in found if (p.variant.family, p.variant.experts, p.variant.rank) == (D, 8, 8)), None)
    if all_used and ungated:
        gains = difference(ungated.losses, all_used.losses)
        if gains:
            lines.append(
                f"- a router over 8 adapters that are all used ({R} 8/8) is {_lower(gains)} than none ({D} 8)."
            )
    return lines


def _size(point: Point) -> str:
    return f"{point.variant.experts}/{point.variant.top_k} ({point.mean:.4f})"


def _forms(found: Sequence[Point]) -> list[str]:
    """Parallel adapters against LoRA's shape."""
    by_name = {point.variant.name: point for point in found}
    lines = []
    for name, point in by_name.items():
        plain = by_name.get(name.removesuffix(" parallel"))
        if point.variant.parallel and plain:
            gains = difference(plain.losses, point.losses)
            if gains:
                lines.append(f"- {name} is {_lower(gains)} than the same of LoRA's shape.")
    return lines


def _lower(gains: Sequence[float]) -> str:
    """Such as `0.0210 ± 0.0030 lower`."""
    word = "lower" if sum(gains) >= 0 else "higher"
    sign = 1 if sum(gains) >= 0 else -1
    return f"{mean_and_spread([sign * gain for gain in gains])} {word}"


def _seeds(gains: Sequence[float]) -> str:
    """With how many seeds it is as on average."""
    sign = 1 if sum(gains) >= 0 else -1
    return f"with {sum(sign * gain > 0 for gain in gains)} of {len(gains)} seeds"
