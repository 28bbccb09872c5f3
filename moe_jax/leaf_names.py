"""Names of leaves, in short."""

from collections.abc import Iterable


def index_set(indices: Iterable[int]) -> str:
    """Indices in short, as a shell would expand them: 3, {0..5}, {1..31..2}, {0,3,4}."""
    ordered = sorted(indices)
    if len(ordered) == 1:
        return str(ordered[0])
    step = ordered[1] - ordered[0]
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1, step)):
        return f"{{{ordered[0]}..{ordered[-1]}{f'..{step}' if step > 1 else ''}}}"
    return f"{{{','.join(map(str, ordered))}}}"
