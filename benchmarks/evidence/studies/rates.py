"""The choice of learning rates, one group of parameters after another, on the selection text alone."""

from collections.abc import Mapping, Sequence

Rates = tuple[tuple[str, float], ...]
# Half decades.
_LEAST, _MOST = -10, 0


def rate(half_decades: int) -> float:
    """1e-3 for -6, 3e-3 for -5, 1e-2 for -4, ..."""
    whole, half = divmod(half_decades, 2)
    return float(f"{3 if half else 1}e{whole}")


def text_of(rates: Rates) -> str:
    """Such as `base 0.001, router 0.003`."""
    return ", ".join(f"{group} {value:g}" for group, value in rates)


def rates_of(text: str) -> Rates:
    """What `text_of` made a text of."""
    return tuple((group, float(value)) for group, value in (part.split(" ") for part in text.split(", ")))


def search(
    groups: Sequence[str], start: Mapping[str, int], tried: Mapping[Rates, float]
) -> tuple[list[Rates], Rates | None]:
    """What to try next, or the choice.

    One group after another is moved by half a decade in either direction for as long as the loss falls; the first
    group is moved once more in the end. So the rate that is chosen for a group lies inside those that were tried,
    unless it is the least or the highest at all (1e-5 and 1).

    Args:
      groups: in the order in which they are moved.
      start: of every group, in half decades (`rate`).
      tried: the losses of what was tried.

    Returns:
      What is still to be tried, all of which can be tried at once; and the choice, once nothing is.
    """
    point = {group: start[group] for group in groups}
    for group in (*groups, groups[0]) if len(groups) > 1 else groups:
        while True:
            moves = [point | {group: point[group] + move} for move in (-1, 0, 1)]
            moves = [move for move in moves if _LEAST <= move[group] <= _MOST]
            missing = [as_rates(move) for move in moves if as_rates(move) not in tried]
            if missing:
                return missing, None
            best = min(moves, key=lambda move: tried[as_rates(move)])
            if best == point:
                break
            point = best
    return [], as_rates(point)


def as_rates(point: Mapping[str, int]) -> Rates:
    """The rates of half decades."""
    return tuple((group, rate(value)) for group, value in point.items())
