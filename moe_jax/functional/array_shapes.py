"""The shapes that arguments must have."""

from types import EllipsisType
from typing import Any

from moe_jax.core.errors import InputError, shown


def check_shape(name: str, array: Any, expected: tuple[int | None | EllipsisType, ...]) -> None:
    """Raises `InputError`, naming both shapes, unless an array has the expected one.

    Args:
      name: of the argument.
      array: anything with a `shape`; under `jax.jit` it is checked once, when the program is traced.
      expected: sizes; None stands for any size, and `...` for any number of axes.
    """
    if not hasattr(array, "shape"):
        raise InputError(f"{name} is {shown(array)}, expected an array")
    import chex  # Here: it takes a twentieth of a second, which commands that compute nothing need not wait for.

    try:
        chex.assert_shape(array, expected)
    except AssertionError:
        wanted = ", ".join({None: "any", ...: "..."}.get(size, str(size)) for size in expected)
        raise InputError(f"{name} has the shape {tuple(array.shape)}, expected ({wanted})") from None
