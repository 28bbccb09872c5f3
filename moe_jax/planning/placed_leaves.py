"""The parameters of a program as they would lie on a mesh of any size, which need not exist."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from moe_jax.core.errors import raise_if_any
from moe_jax.distributed.sharding import leaf_spec, parts, path_name, undivided
from moe_jax.experts.devices import spec_on_mesh
from moe_jax.training.program import Program

# Axes that split parameters which every device along them needs as a whole.
_GATHERED = ("fsdp", "sequence")


class PlacedLeaf(NamedTuple):
    """A parameter on a mesh.

    Attributes:
      path: in memory, see `distributed.sharding.leaf_spec`.
      shape: of one layer's parameter.
      layers: number of layers that have one.
      dtype: as it is stored.
      axes: mesh axes that split it, with their sizes above 1.
      trained: whether a step changes it.
    """

    path: str
    shape: tuple[int, ...]
    layers: int
    dtype: np.dtype
    axes: dict[str, int]
    trained: bool

    @property
    def gathered_over(self) -> tuple[str, ...]:
        """The axes along which every device needs the whole parameter."""
        return tuple(axis for axis in _GATHERED if axis in self.axes)

    @property
    def held(self) -> int:
        """Number of one layer's entries that a device keeps."""
        return math.prod(self.shape) // math.prod(self.axes.values())

    @property
    def gathered(self) -> int:
        """Number of one layer's entries when it is gathered."""
        return self.held * math.prod(self.axes[axis] for axis in self.gathered_over)

    @property
    def is_in_stack(self) -> bool:
        """Whether it belongs to a layer."""
        return "segments/" in self.path


def placed_leaves(program: Program, mesh: Mapping[str, int]) -> list[PlacedLeaf]:
    """Returns all parameters of a program on a mesh with axes of these sizes; the program's own mesh may be another.

    Raises:
      InputError: a dimension that its axes do not divide; all are listed.
    """
    problems: list[str] = []
    trees = ((True, program.state.params), (False, program.frozen))
    found = [leaf for trained, tree in trees for leaf in _placed(tree, trained, mesh, problems)]
    raise_if_any(problems, "mesh")
    return found


def _placed(tree: object, trained: bool, mesh: Mapping[str, int], problems: list[str]) -> Iterator[PlacedLeaf]:
    for key, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = path_name(key)
        spec = spec_on_mesh(leaf_spec(path), leaf.shape, mesh)
        problems += [f"{path} {leaf.shape}: {problem}" for problem in undivided(leaf.shape, spec, mesh)]
        shape, layers = (leaf.shape[1:], leaf.shape[0]) if "segments/" in path else (leaf.shape, 1)
        yield PlacedLeaf(path, shape, layers, np.dtype(leaf.dtype), _axes(spec, mesh), trained)


def _axes(spec: P, mesh: Mapping[str, int]) -> dict[str, int]:
    names = [name for part in spec for name in (part if isinstance(part, tuple) else (part,)) if name is not None]
    return {name: parts(name, mesh) for name in names if parts(name, mesh) > 1}
