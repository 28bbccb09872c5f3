"""From runs to what tables and plots say."""

import statistics

from ders.results import Results
from ders.settings import DENSE


def losses(results: Results, kind: str) -> dict[str, float]:
    """Held-out loss by seed; empty if there are no runs of the kind."""
    return {seed: run["loss"] for seed, run in (results.get("training", kind) or {}).items()}


def difference(these: dict[str, float], those: dict[str, float]) -> list[float]:
    """What these have more than those, seed by seed: the order of the text is then no part of the spread."""
    return [loss - those[seed] for seed, loss in these.items() if seed in those]


def added_params(results: Results, kind: str) -> int:
    """Parameters that the kind has and the dense model has not."""
    params = [next(iter(results.get("training", name).values()))["params"] for name in (kind, DENSE)]
    return params[0] - params[1]


def added_losses(results: Results, base: str, method: str, value: str) -> list[float]:
    """Loss that a compression adds to the vanilla model of the same seed."""
    return [run["added_loss"] for run in (results.get("compression", base, method, value) or {}).values()]


def drop_noise(results: Results, base: str, drop: str) -> float | None:
    """What dropping entries of the deltas at random and rescaling the rest adds to the experts, by the numbers alone.

    An entry that is kept with probability 1 - p and divided by it has p/(1 - p) times its square as variance, and the
    delta has 1 - cos² of the expert's squared norm, cos that between expert and base.

    Returns:
      Mean over seeds and layers, in parts of the experts' squared norm; None if there are no runs.
    """
    runs = (results.get("compression", base, "drop", drop) or {}).values()
    shares = [1 - cosine**2 for run in runs for cosine in run.get("cosine_mean", ())]
    rate = float(drop)
    return rate / (1 - rate) * statistics.mean(shares) if shares else None
