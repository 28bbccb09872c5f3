"""Mean and spread over seeds. Spread is the standard deviation (n - 1)."""

import statistics
from collections.abc import Iterable, Sequence


def spread(values: Sequence[float]) -> float:
    """Standard deviation; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def mean(values: Iterable[float], form: str = ".4f") -> str:
    """Such as `2.7163`; nothing if there are no values."""
    values = list(values)
    return f"{statistics.mean(values):{form}}" if values else ""


def mean_and_spread(values: Iterable[float], form: str = ".4f") -> str:
    """Such as `2.7163 ± 0.0101`; nothing if there are no values, no spread if there is one."""
    values = list(values)
    if len(values) < 2:
        return mean(values, form)
    return f"{mean(values, form)} ± {spread(values):{form.removeprefix('+')}}"
