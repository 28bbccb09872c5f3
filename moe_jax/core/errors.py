"""Errors that the user can correct, as opposed to bugs of this library.

The command line prints an `InputError` as one line and exits with code 2; any
other exception keeps its traceback, because then the fault is in this library.
"""

import difflib
import itertools
import numbers
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

# What a message repeats of a file or an argument is never longer.
MAX_SHOWN = 80
MAX_LINE = 1000

# No size of anything is larger: what counts elements and tokens has 32 bits.
MAX_SIZE = 2**31 - 1

# Numbers of a config are computed with in float32, where what is larger is infinite.
MAX_FLOAT32 = 3.4028235e38


USER_ERROR, SIGNALLED = 2, 128
"""Exit codes: 2 for errors that the user can correct (as in argparse), 128 + N for signal N (as in shells)."""


class InputError(ValueError):
    """Bad input: the message says what, where, what was expected and what to do.

    >>> moe_jax.upcycle(moe_jax.tiny_model(), experts=2, top_k=3)
    Traceback (most recent call last):
    moe_jax.core.errors.InputError: these options do not go together: top_k=3 is above num_experts=2
    """


def shown(value: Any) -> str:
    """A value for a message: as Python writes it, in at most `MAX_SHOWN` characters, however large it is.

    Every message that repeats something from a file or an argument has it from here. Control characters are escaped.
    """
    return clipped(_beginning(value, levels=3))


def clipped(text: str) -> str:
    """The text, or its beginning and `...` if it has more than `MAX_SHOWN` characters."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def printable(text: str) -> str:
    """The text for a terminal: control characters escaped, and no line longer than a screen can hold.

    Messages should not need it. But names of files may hold anything, and what libraries say has any length.
    """
    lines = (line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 3]}..." for line in text.split("\n"))
    return "\n".join(
        line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines
    )


def _beginning(value: Any, levels: int) -> str:
    """Returns the beginning of `repr(value)`, without the work for the rest."""
    if isinstance(value, str | bytes):
        return repr(value[:MAX_SHOWN])
    if isinstance(value, int) and value.bit_length() > 4 * MAX_SHOWN:
        return f"an integer of {value.bit_length()} bits"
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return repr(value)
    if not levels:
        return "..."
    first = itertools.islice(value.items() if isinstance(value, Mapping) else value, MAX_SHOWN // 4)
    if isinstance(value, Mapping):
        items = [f"{_beginning(key, levels - 1)}: {_beginning(item, levels - 1)}" for key, item in first]
    else:
        items = [_beginning(item, levels - 1) for item in first]
    rest = ", ..." if len(value) > len(items) else "," * (isinstance(value, tuple) and len(value) == 1)
    opening, closing = "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
    return f"{opening}{', '.join(items)}{rest}{closing}"


def nearest(word: str, options: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Returns ` (did you mean 'x'?)` for the option closest to `word`, or an empty string; 1 is equal, 0 not alike.

    Upper and lower case are alike.
    """
    if len(word) > MAX_SHOWN:  # comparing takes time that grows with the square of the length
        return ""
    by_folded = {option.casefold(): option for option in options}
    close = difflib.get_close_matches(word.casefold(), list(by_folded), n=1, cutoff=cutoff)
    return f" (did you mean {by_folded[close[0]]!r}?)" if close else ""


def raise_if_any(problems: Sequence[str], headline: str, *, limit: int = 40) -> None:
    """Raises one `InputError` that lists every problem found, if there are any, so that one run shows them all.

    The headline says what was being done; problems beyond `limit` are counted.
    """
    if not problems:
        return
    shown = list(problems[:limit])
    if len(problems) > limit:
        shown.append(f"and {len(problems) - limit} more")
    if len(shown) == 1:
        raise InputError(f"{headline}: {shown[0]}")
    raise InputError(f"{headline}: {len(problems)} problems\n" + "\n".join(f"  - {p}" for p in shown))


def check_positive(config: Any, *names: str, at_most: int = MAX_SIZE) -> None:
    """Raises `InputError` unless every named attribute of `config` is a positive integer, and at most `at_most`.

    An attribute that is None is not checked.
    """
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}={shown(value)} must be a positive integer")
        if value > at_most:
            raise InputError(f"{name}={shown(value)} must be at most {at_most:,}")


def check_number(config: Any, *names: str, above: float | None = None, at_least: float | None = None) -> None:
    """Raises `InputError` unless every named attribute of `config` is a finite number in the range.

    An attribute that is None is not checked.
    """
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if not is_finite(value):
            raise InputError(f"{name}={shown(value)} must be a finite number")
        if above is not None and not value > above:
            raise InputError(f"{name}={shown(value)} must be above {above}")
        if at_least is not None and not value >= at_least:
            raise InputError(f"{name}={shown(value)} must be at least {at_least}")


def is_finite(value: Any) -> bool:
    """Whether `value` is a number that is finite in float32."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    magnitude: Any = abs(value)
    return magnitude <= MAX_FLOAT32


def check_member(what: str, value: str, options: Collection[str]) -> None:
    """Raises `InputError`, with the nearest option, unless `value` is one of `options`."""
    if not isinstance(value, str) or value not in options:
        hint = nearest(value, options) if isinstance(value, str) else ""
        raise InputError(f"unknown {what} {shown(value)}{hint}; known: {', '.join(options)}")


def flag_of(option: str) -> str:
    """An option as it is written on the command line: `max_shard_size` as `--max-shard-size`."""
    return f"--{option.replace('_', '-')}"


def first_sentence(error: BaseException) -> str:
    """Returns the beginning of an error's message, in at most `MAX_SHOWN` characters, and not cut within a word.

    Sentences are left out whole where the first of them is short enough.
    """
    line = first_line(error)
    if len(line) <= MAX_SHOWN:
        return line
    end = line.rfind(". ", 0, MAX_SHOWN)
    return line[:end] if end > 0 else f"{line[: MAX_SHOWN - 3].rpartition(' ')[0] or line[: MAX_SHOWN - 3]}..."


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
