"""A mesh of devices, as an option says it."""

import re

from moe_jax.errors import InputError, shown


def parse_mesh(text: str) -> dict[str, int]:
    """`fsdp=8,tensor=2` as a dict.

    Raises:
      InputError: for anything else.
    """
    mesh = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not re.fullmatch(r"\s*\d{1,9}\s*", size) or axis.strip() in mesh:
            raise InputError(f"--mesh {shown(text)}: expected each axis once with its size, as in fsdp=8,tensor=2")
        mesh[axis.strip()] = int(size)
    return mesh
