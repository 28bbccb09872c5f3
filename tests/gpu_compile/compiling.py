"""Programs for GPUs that are not there, compiled by XLA:GPU; `make test-gpu-compile` installs it."""

import functools
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.planning import planned_devices
from tests.support.uncached import uncached

needs_xla_gpu = pytest.mark.skipif(
    not planned_devices.has_gpu_compiler(), reason="JAX's CUDA plugin, which holds XLA:GPU, is not installed"
)
planned_devices.prepare_environment()

MIB = 1 << 20


class Program(NamedTuple):
    """What the compiler made.

    Attributes:
      text: of the optimised program.
      temporaries: bytes held besides arguments and results.
    """

    text: str
    temporaries: int

    @property
    def kernels(self) -> list[str]:
        """Targets of custom calls, in the order of the text; `pallas_triton` and `mosaic_gpu` for Pallas kernels."""
        names = {"__gpu$xla.gpu.triton": "pallas_triton", "mosaic_gpu_v2": "mosaic_gpu"}
        targets = re.findall(r'custom_call_target="([^"]+)"', self.text)
        return [names.get(target, target) for target in targets]

    @property
    def dynamic_loops(self) -> list[str]:
        """Loops whose number of turns the compiler does not know: each turn asks the host."""
        loops = [line.strip() for line in self.text.splitlines() if re.search(r"\bwhile\(", line)]
        return [line for line in loops if "known_trip_count" not in line]

    def arrays(self) -> set[tuple[str, tuple[int, ...]]]:
        """Dtype and shape of every array in the program."""
        found = re.findall(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]", self.text)
        return {(dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in found}


@functools.cache
def mesh_of(topology: str) -> Mesh:
    """A mesh of one GPU."""
    return Mesh(np.array(planned_devices.described_devices(topology)).reshape(1), ("data",))


def compiled(function: Any, *arguments: Any, topology: str = "h100:1") -> Program:
    """Compiles a function of arrays, of which only shapes and dtypes count."""
    mesh = mesh_of(topology)
    whole = NamedSharding(mesh, P())
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), arguments)
    with uncached(), jax.set_mesh(mesh):
        done = jax.jit(function).lower(*shapes).compile()
    return Program(done.as_text(), done.memory_analysis().temp_size_in_bytes)


def shape(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    """An array without values."""
    return jax.ShapeDtypeStruct(sizes, dtype)
