"""Rounds lengths up to few sizes ("buckets"), so that one compiled program serves many lengths."""


def bucket(length: int, *, least: int = 16) -> int:
    """Returns the smallest of `least`, 1.5 `least`, 2 `least`, 3 `least`, 4 `least`, ... that is at least `length`.

    Args:
      length: at least 1.
      least: an even number.
    """
    size = least
    while size < length:
        if 3 * size // 2 >= length:
            return 3 * size // 2
        size *= 2
    return size
