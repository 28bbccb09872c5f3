"""From runs to what tables and plots say."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from resmoe.results import Results
from resmoe.settings import ORIGINS
from resmoe.variants import BASELINE, MAIN_KEEP, PUBLISHED, VARIANTS, values_for

# A model whose perplexity is more than so many times that of the uncompressed one is of no use, however small.
USEFUL = 4


def seeds_of(results: Results, origin: str) -> tuple[str, ...]:
    """Seeds whose models are described."""
    return tuple(results.get("models", origin) or {})


def runs(results: Results, origin: str, name: str, value: float) -> dict[str, dict[str, Any]]:
    """By seed; empty if there are none."""
    return results.get("compression", origin, name, f"{value:g}") or {}


def errors(results: Results, origin: str, name: str, value: float) -> dict[str, float]:
    """eps / f, the mean over layers, by seed; empty where the method has none."""
    return {
        seed: statistics.mean(run["error_per_neuron"])
        for seed, run in runs(results, origin, name, value).items()
        if None not in run["error_per_neuron"]
    }


def perplexities(results: Results, origin: str, name: str, value: float) -> dict[str, float]:
    """Held-out, by seed."""
    return {seed: perplexity(run["loss"]) for seed, run in runs(results, origin, name, value).items()}


def perplexity(loss: float) -> float:
    """exp(loss), at most 1e9: a model that is destroyed must still fit a table."""
    return math.exp(min(loss, math.log(1e9))) if math.isfinite(loss) else 1e9


def uncompressed_perplexity(results: Results, origin: str) -> float:
    """Held-out, mean over seeds."""
    return statistics.mean(perplexity(model["loss"]) for model in results.get("models", origin).values())


def bits_per_weight(results: Results, origin: str, name: str, value: float) -> float:
    """Bytes of the experts on the disk, whatever they hold, in bits per parameter that the experts had."""
    shares = [
        8 * run["expert_bytes_after"] / results.get("models", origin, seed)["expert_params"]
        for seed, run in runs(results, origin, name, value).items()
    ]
    return statistics.mean(shares)


def left_beside_centre(results: Results, origin: str) -> list[float]:
    """Share of the experts' squared norm that the barycenter does not hold, by seed."""
    shares = []
    for seed, run in runs(results, origin, PUBLISHED, MAIN_KEEP).items():
        if None not in run["objective"]:
            shares.append(sum(run["objective"]) / sum(results.get("models", origin, seed)["squared_norm"]))
    return shares


def reductions(these: dict[str, float], those: dict[str, float]) -> list[float]:
    """By what share these are lower than those, seed by seed."""
    return [1 - value / those[seed] for seed, value in these.items() if seed in those]


class Point(NamedTuple):
    """A compressed model, over all seeds.

    Attributes:
      name, value: of the variant.
      bits: per weight.
      error: eps / f of what is stored, mean over layers and seeds.
      perplexities: by seed.
    """

    name: str
    value: float
    bits: float
    error: float
    perplexities: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.perplexities)

    @property
    def label(self) -> str:
        """Such as `UP, keep 0.25`."""
        return f"{self.name}, {VARIANTS[self.name].swept} {self.value:g}"


def points(results: Results, origin: str) -> Iterator[Point]:
    """All that was done to the models of an origin."""
    for name, variant in VARIANTS.items():
        for value in values_for(variant, ORIGINS[origin].num_experts):
            found = perplexities(results, origin, name, value)
            if found:
                bits = bits_per_weight(results, origin, name, value)
                stored = runs(results, origin, name, value).values()
                error = statistics.mean(layer for run in stored for layer in run["least_error_per_neuron"])
                yield Point(name, value, bits, error, tuple(found.values()))


def within(found: Sequence[Point], family: str, bits: float) -> Point | None:
    """The point of a family that takes no more room and has the lowest error; None if nothing fits.

    Not the lowest perplexity: the best of many on the text that is scored looks better than it is. Of baselines it is
    the lowest perplexity all the same: what ResMoE is compared with may look better than it is, but not worse.
    """
    # Half a hundredth: what scales differ by is no reason to leave a method out.
    fitting = [point for point in found if VARIANTS[point.name].family == family and point.bits <= bits * 1.005]
    return min(fitting, key=lambda point: point.mean if family == BASELINE else point.error, default=None)


def frontier(found: Sequence[Point]) -> list[Point]:
    """Points that no other one beats in both bits and error, by bits."""
    kept: list[Point] = []
    for point in sorted(found, key=lambda point: (point.bits, point.error)):
        if not kept or point.error < kept[-1].error:
            kept.append(point)
    return kept
