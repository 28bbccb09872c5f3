"""Reads a mesh of devices from the text of an option."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from moe_jax.core.errors import InputError, raise_if_any, shown

if TYPE_CHECKING:
    from moe_jax.training.recipe.schema import MeshSection


def parse_mesh(text: str) -> dict[str, int]:
    """Reads `fsdp=8,tensor=2`: returns the sizes of the axes by name.

    Raises:
      InputError: for a text of another form.
    """
    mesh = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not re.fullmatch(r"\s*\d{1,9}\s*", size) or axis.strip() in mesh:
            raise InputError(f"--mesh {shown(text)}: expected each axis once with its size, as in fsdp=8,tensor=2")
        mesh[axis.strip()] = int(size)
    return mesh


def mesh_section(mesh: Mapping[str, int]) -> "MeshSection":
    """Returns a mesh as a section of a recipe; axes that are not named have size 1.

    Raises:
      InputError: for unknown axes, or sizes below 1.
    """
    from moe_jax.distributed.sharding import AXES, unknown_axes
    from moe_jax.training.recipe.schema import MeshSection

    problems = unknown_axes(mesh)
    problems += [f"{axis}={size} must be at least 1" for axis, size in mesh.items() if size < 1]
    raise_if_any(problems, f"--mesh (axes are {', '.join(AXES)})")
    return MeshSection(**{axis: mesh.get(axis, 1) for axis in AXES})
