"""What the numbers say about what the papers say: compared here, not written beforehand."""

from collections.abc import Sequence

from quality.spread import mean_and_spread
from tuning.kinds import ADAPTERS, DENSE, DENSE_LORA, KINDS, VANILLA
from tuning.kinds import FULL as REST_FULL
from tuning.results import Results
from tuning.summary import Point, compare, curve, difference, losses, points
from tuning.variants import FULL, LORA_QV, LORA_ROUTER, D, E, R, S, variants

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
            judged = _one_rate(results, pair[0]) or verdict(found)
            lines.append(f"{said}; {judged}." if pair in claimed else f"{said}, {_seeds(found)}.")
    return "\n".join(lines)


def _one_rate(results: Results, name: str) -> str | None:
    """Why nothing is decided, where the learning rate of a whole model is far below that of its adapters alone."""
    kind = KINDS[name]
    alone = results.get("rates", "upcycled", "PESC 8, rest frozen")
    if (kind.experts, kind.rest) != (ADAPTERS, REST_FULL) or alone is None:
        return None
    rate = results.get("rates", "upcycled", kind.rates_of or name)["chosen"]
    if alone["chosen"] < 3 * rate:
        return None
    return (
        f"not decided: all parameters have one learning rate, {rate:g}, and adapters alone learn best at "
        f"{alone['chosen']:g}"
    )


def tuned_findings(results: Results, text: str) -> str:
    """What PERFT (arXiv 2411.08212) says of its variants, on one text."""
    found, count = points(results, text), results.settings.num_experts
    lines = [*_order(results, found), *_degradation(found), *_at_fixed_rates(results, text), *_sizes(found)]
    lines += _forms(found)
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
    """R and E above D and S, and all of them above LoRA, at equal active parameters and equal learning rates."""
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
        left = f"{comparison.left_out} left out, whose rates differ"
        if comparison.gains:
            lines.append(
                f"- {name} above {worse} at equal active parameters and rates: better at {comparison.won} of "
                f"{comparison.budgets} budgets ({left}), loss {_lower(comparison.gains)} on average; "
                f"{verdict(comparison.gains)}."
            )
        else:
            lines.append(f"- {name} above {worse}: not decided, no budget has equal rates ({left}).")
    return lines


def _degradation(found: Sequence[Point]) -> list[str]:
    """D gets worse with more adapters and with a larger rank; what a larger rank does to S."""
    dense = {(p.variant.experts, p.variant.rank): p for p in found if p.variant.family == D and not p.variant.parallel}
    lines = []
    for rank in sorted({rank for _, rank in dense}):
        counts = sorted(experts for experts, at in dense if at == rank)
        ends = dense[counts[0], rank], dense[counts[-1], rank]
        lines += _degrades(f"{D} r={rank} degrades from M={counts[0]} to {counts[-1]}", *ends)
    for experts in sorted({experts for experts, _ in dense}):
        ranks = sorted(rank for at, rank in dense if at == experts)
        ends = dense[experts, ranks[0]], dense[experts, ranks[-1]]
        lines += _degrades(f"{D} M={experts} degrades from rank {ranks[0]} to {ranks[-1]}", *ends)
    single = sorted(
        (p for p in found if p.variant.family == S and not p.variant.parallel), key=lambda point: point.active
    )
    if len(single) > 1:
        change = mean_and_spread(difference(single[-1].losses, single[0].losses), "+.4f")
        ranks = f"{single[0].variant.rank} to {single[-1].variant.rank}"
        lines.append(f"- {S} from rank {ranks}: loss changes by {change}{_rates(single[0], single[-1])}.")
    return lines


def _degrades(what: str, small: Point, large: Point) -> list[str]:
    """Nothing where there are no two points of a seed, or where both are the same one."""
    rises = difference(large.losses, small.losses)
    if not any(rises):
        return []
    said = f"- {what}: loss changes by {mean_and_spread(rises, '+.4f')}{_rates(small, large)}"
    judged = verdict(rises) if small.rate == large.rate else "not decided, each has the rate chosen for its rank"
    return [f"{said}; {judged}."]


def _rates(first: Point, second: Point) -> str:
    """With what learning rates two points were trained."""
    both = first.rate == second.rate
    return f" at rate {first.rate:g}" if both else f", at rate {first.rate:g} and then {second.rate:g}"


def _at_fixed_rates(results: Results, text: str) -> list[str]:
    """What a larger rank does where the learning rate stays: the runs that rates were chosen with, one seed."""
    by_family: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for variant in variants(results.settings):
        tried = results.get("rates", "tuned", variant.name)
        if variant.family in (R, E, D, S) and tried and tried["text"] == text:
            by_family.setdefault(variant.family, []).append((variant.rank, tried["validation_loss"]))
    lines = []
    for family, found in by_family.items():
        found.sort(key=lambda item: item[0])
        if len(found) < 2:
            continue
        ranks = " / ".join(str(rank) for rank, _ in found)
        rows = "; ".join(
            f"{rate}: {' / '.join(f'{at[rate]:.3f}' for _, at in found)}" for rate in sorted(found[0][1], key=float)
        )
        lines.append(f"- {family} at a fixed rate, ranks {ranks}, validation loss of one seed: {rows}.")
    return lines


def _sizes(found: Sequence[Point]) -> list[str]:
    """How many adapters PERFT-R should have and use, at one rank."""
    routed = [p for p in found if p.variant.family == R and p.variant.rank == 8 and not p.variant.parallel]
    if len(routed) < 2:
        return []
    best, worst = (choose(routed, key=lambda point: point.mean) for choose in (min, max))
    gap = mean_and_spread(difference(worst.losses, best.losses), ".4f")
    lines = [f"- of the sizes M/K of {R} at rank 8 {_size(best)} is lowest and {_size(worst)} highest, {gap} apart."]
    all_used = next((p for p in routed if (p.variant.experts, p.variant.top_k) == (8, 8)), None)
    ungated = next((p for p in found if (p.variant.family, p.variant.experts, p.variant.rank) == (D, 8, 8)), None)
    if all_used and ungated:
        gains = difference(ungated.losses, all_used.losses)
        if gains and ungated.rate == all_used.rate:
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
                lines.append(f"- {name} is {_lower(gains)} than the same of LoRA's shape, whose rate it has.")
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
