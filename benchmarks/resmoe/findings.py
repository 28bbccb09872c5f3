"""What the numbers say about what was expected: compared here, not written beforehand."""

import statistics
from collections.abc import Callable, Sequence

from quality.spread import mean_and_spread
from resmoe.results import Results
from resmoe.settings import ORIGINS
from resmoe.summary import Point, errors, left_beside_centre, perplexities, reductions, within
from resmoe.variants import (
    BASELINE,
    MAIN_KEEP,
    PLAIN,
    PUBLISHED,
    REFITTED,
    RESMOE,
    VARIANTS,
    refit_pairs,
)

# By how much the refit is expected to lower the squared error, at 8 and at 4 experts.
EXPECTED_REDUCTION = (0.20, 0.40)
# bfloat16 rounds what a method measured in float32.
_CHECK_TOLERANCE = 1e-3
_AVERAGE = "average + UP"
Measure = Callable[[Results, str, str, float], dict[str, float]]


def error_findings(results: Results, origins: Sequence[str]) -> str:
    """Whether ResMoE's default has a lower error and a lower perplexity than every baseline at equal kept share."""
    lines = []
    for origin in origins:
        for what, measure in (("eps/f", errors), ("perplexity", perplexities)):
            theirs = {
                name: statistics.mean(values)
                for name, variant in VARIANTS.items()
                if variant.family == BASELINE
                and variant.swept == "keep"
                and (values := [*measure(results, origin, name, MAIN_KEEP).values()])
            }
            if theirs and measure(results, origin, REFITTED, MAIN_KEEP):
                lines.append(_verdict(results, origin, what, measure, min(theirs, key=theirs.__getitem__)))
        lines += _centre_finding(results, origin)
    return "\n".join(lines)


def _verdict(results: Results, origin: str, what: str, measure: Measure, theirs: str) -> str:
    """One line: whether ResMoE is below the lowest baseline, and how surely."""
    pairs = [measure(results, origin, name, MAIN_KEEP) for name in (REFITTED, theirs)]
    ours, lowest = (statistics.mean(by_seed.values()) for by_seed in pairs)
    wins = sum(pairs[0][seed] < pairs[1][seed] for seed in pairs[0] if seed in pairs[1])
    said = f"{REFITTED} ({ours:.4g}) against {theirs} ({lowest:.4g})"
    held = f"lower with {wins} of {len(pairs[0])} seeds"
    if ours < lowest:
        return f"- {origin}, {what}: lower than every baseline, as expected: {said}, {held}."
    left = mean_and_spread((100 * share for share in left_beside_centre(results, origin)), ".0f")
    why = f" The centre leaves {left} % of the squared norm to the residuals." if left else ""
    return f"- {origin}, {what}: **against the expectation a baseline is lowest**: {said}, {held}.{why}"


def _centre_finding(results: Results, origin: str) -> list[str]:
    """What the barycenter is worth against the plain average."""
    lower = reductions(*(errors(results, origin, name, MAIN_KEEP) for name in (REFITTED, _AVERAGE)))
    if not lower:
        return []
    if max(map(abs, lower)) < 5e-4:
        return [f"- {origin}: the barycenter is no better a centre than the average: the neurons are in one order."]
    change = "lower" if statistics.mean(lower) >= 0 else "higher"
    share = mean_and_spread((100 * abs(value) for value in lower), ".1f")
    return [f"- {origin}: with the barycenter as centre eps/f is {share} % {change} than with the average."]


def refit_findings(results: Results, origins: Sequence[str]) -> str:
    """Whether the refit lowers the error by as much as expected."""
    low, high = EXPECTED_REDUCTION
    lines = []
    for origin in origins:
        for pair, (refitted, published) in refit_pairs().items():
            lower = reductions(*(errors(results, origin, name, MAIN_KEEP) for name in (refitted, published)))
            if not lower or published != PUBLISHED:
                continue
            mean = statistics.mean(lower)
            if low <= mean <= high:
                verdict = "as expected"
            else:
                verdict = f"**{'less' if mean < low else 'more'} than expected**"
            lines.append(
                f"- {origin} ({ORIGINS[origin].num_experts} experts), {pair}: the refit lowers the squared error by "
                f"{mean:.1%}, {verdict} ({low:.0%} to {high:.0%})."
            )
    return "\n".join(lines)


def byte_findings(found: Sequence[Point]) -> str:
    """Where ResMoE beats baselines and plain quantisation that take as much room, and where it does not."""
    lines = [_at_its_bytes(point, found) for point in found if (point.name, point.value) == (REFITTED, MAIN_KEEP)]
    for budget in sorted((point for point in found if VARIANTS[point.name].family == PLAIN), key=lambda p: -p.bits):
        ours = within(found, RESMOE, budget.bits)
        said = f"- at the bytes of {budget.value:g}-bit quantisation ({budget.bits:.2f} bits per weight): "
        if ours is None:
            lines.append(f"{said}no form of ResMoE that was tried fits.")
        elif ours.mean < budget.mean:
            lines.append(f"{said}ResMoE is better, {ours.mean:.3f} ({ours.label}) against {budget.mean:.3f}.")
        else:
            lines.append(
                f"{said}plain quantisation is better, {budget.mean:.3f} against {ours.mean:.3f} ({ours.label})."
            )
    return "\n".join(lines)


def _at_its_bytes(ours: Point, found: Sequence[Point]) -> str:
    """What the others make of the bytes of pruned residuals, their centre included."""
    said = []
    for family in (BASELINE, PLAIN):
        best = within(found, family, ours.bits)
        said.append(f"no {family} fits" if best is None else f"{best.mean:.3f} with {best.label}")
    return f"- at the bytes of {ours.label} ({ours.bits:.2f} bits per weight): {ours.mean:.3f}, {', '.join(said)}."


def check_findings(results: Results, origins: Sequence[str]) -> str:
    """What was measured twice: losses of served models, and errors with the neurons matched anew."""
    found = [
        (name, run)
        for origin in origins
        for name, by_value in (results.get("compression", origin) or {}).items()
        for by_seed in by_value.values()
        for run in by_seed.values()
    ]
    lines = []
    served = [abs(run["served_loss"] - run["loss"]) for _, run in found if "served_loss" in run]
    if served:
        lines.append(
            "- All are scored with what their experts became put into the uncompressed model. "
            f"{len(served)} were also scored as they are served: the losses differ by at most {max(served):.1g} nats."
        )
    above: dict[str, float] = {}
    for name, run in found:
        if None not in run["error_per_neuron"]:
            ratio = sum(run["least_error_per_neuron"]) / sum(run["error_per_neuron"])
            above[name] = max(ratio, above.get(name, 0.0))
    others = ", ".join(f"{name} ({ratio:.2f} times)" for name, ratio in above.items() if ratio > 1 + _CHECK_TOLERANCE)
    if above:
        lines.append(
            "- eps/f of the stored experts, with the neurons matched anew by SciPy, is at most what the method itself "
            f"says{f'. But for {others}: their own error is not that of the stored neurons' if others else ''}."
        )
    return "\n".join(lines)
