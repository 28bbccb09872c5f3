"""The axes of meshes, by name."""

from collections.abc import Iterable

from moe_jax.core.errors import nearest, shown

AXES = ("data", "fsdp", "expert", "sequence", "tensor")


def unknown_axes(axes: Iterable[str]) -> list[str]:
    """Returns a problem, in words, for every axis that is not in `AXES`."""
    return [f"unknown mesh axis {shown(name)}{nearest(name, AXES)}" for name in axes if name not in AXES]
