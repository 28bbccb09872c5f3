"""Programs that are compiled for an accelerator on a machine that has none, and what the compiler says of them."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.planning.planned_devices import described_devices

MIB = 1 << 20


def compiled_row(topology: str, name: str, function: Callable[..., Any], arguments: Any, *, tokens: int) -> list[Any]:
    """Compiles for one device of a topology; returns a row of `layouts.COMPILED`.

    Raises `SystemExit` if an array of the program is of tokens x tokens.
    """
    mesh = Mesh(np.array(described_devices(topology)[:1]), ("data",))
    whole = NamedSharding(mesh, P())
    shapes = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=whole), arguments)
    with jax.set_mesh(mesh):
        done = jax.jit(function).lower(*shapes).compile()
    memory = done.memory_analysis()
    assert memory is not None, "these compilers all say it"
    found = {
        (dtype, tuple(int(size) for size in sizes.split(",")))
        for dtype, sizes in re.findall(r"\b([a-z]+\d+)\[([\d,]+)\]", done.as_text())
    }
    square = [one for one in found if sum(size % tokens == 0 for size in one[1]) > 1]
    if square:
        raise SystemExit(f"{topology}, {name}: arrays of tokens x tokens: {square}")
    dtype, sizes = max(found, key=lambda one: math.prod(one[1]))
    largest = f"{dtype}{list(sizes)}"
    return [topology, name, memory.argument_size_in_bytes / MIB, memory.temp_size_in_bytes / MIB, largest]
