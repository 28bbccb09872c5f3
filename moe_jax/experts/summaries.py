"""Modules that say in a few lines what they are, however large: for `repr`, `print` and messages."""

import math
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from flax.nnx import reprlib

from moe_jax.core.formatting import show_bytes
from moe_jax.experts.linear import Fixed

MOST_LINES, WIDTH = 28, 118


class Summarised(nnx.Module):
    """A module whose `repr` is its summary, from shapes alone; `nnx.state` lists its arrays."""

    def _summary(self) -> list[str]:
        """Returns the lines of the summary: the first in the brackets of the class, the others below it."""
        return [size_of(self)]

    def __nnx_repr__(self) -> Iterator[Any]:
        try:
            first, *others = self._summary()
        except Exception:  # a debugger shows modules that are half built, and messages those that are wrong
            first, others = "incomplete", []
        lines = _wrapped(f"{type(self).__name__}({first})", "")
        lines += [part for line in others for part in _wrapped(line, "  ")]
        if len(lines) > MOST_LINES:
            lines[MOST_LINES - 1 :] = [f"  ... and {len(lines) - MOST_LINES + 1} more lines"]
        yield reprlib.Object("\n".join(lines), start="", end="")


def size_of(module: nnx.Module) -> str:
    """Returns the parameters, bytes and dtypes of a module in words; its arrays may be abstract, traced or absent."""
    trained, fixed = (_arrays(nnx.state(module, kind)) for kind in (nnx.Param, Fixed))
    size = show_bytes(sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in trained + fixed))
    dtypes = sorted({str(leaf.dtype) for leaf in trained + fixed})
    codes = " beside codes" if "uint8" in dtypes else ""
    count = sum(math.prod(leaf.shape) for leaf in trained)
    return f"{count:,} parameters{codes}, {size} of {' and '.join(dtypes) or 'nothing'}"


def _arrays(state: nnx.State) -> list[Any]:
    """Returns the arrays of a state; programs put shardings and the like in their places."""
    return [leaf for leaf in jax.tree.leaves(state) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]


def _wrapped(line: str, indent: str) -> list[str]:
    """Returns a line in at most three."""
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", max_lines=3)
    wrapper.placeholder, wrapper.break_on_hyphens = " ...", False
    return wrapper.wrap(line)
