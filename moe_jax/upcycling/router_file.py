"""A router in a file of its own, for all MoE layers of a new model (Med-MoE)."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from moe_jax.conversion.safetensors_file import read_header
from moe_jax.conversion.tensors import DTYPES, TensorEntry, TensorFiles
from moe_jax.conversion.torch_file import read_torch_file
from moe_jax.core.errors import InputError
from moe_jax.core.finite import check_finite
from moe_jax.files.storage_path import as_path
from moe_jax.models import MoEConfig


class LinearRouter(NamedTuple):
    """The parameters of a linear router, float32; `bias` is None where it has none, or begins at zero."""

    kernel: Float[np.ndarray, "d E"]
    bias: Float[np.ndarray, " E"] | None = None


def read_router(file: Path | str, moe: MoEConfig, d_model: int) -> LinearRouter:
    """Reads a router: the one matrix [E, d] of a safetensors or PyTorch file, and perhaps a bias [E], of any names.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: if it holds anything else, or a bias for a router that has none, or numbers that are not finite.
    """
    place = as_path(file)
    tensors = read_header(place) if place.name.endswith(".safetensors") else read_torch_file(place)
    matrices, vectors = ([name for name in tensors if len(tensors[name].shape) == axes] for axes in (2, 1))
    wanted = (moe.num_experts, d_model)
    found = ", ".join(f"{name} {list(entry.shape)}" for name, entry in list(tensors.items())[:4]) or "nothing"
    expected = (
        f"expected one matrix {list(wanted)}, the router of {wanted[0]} experts, and perhaps a bias [{wanted[0]}]"
    )
    fits = len(matrices) == 1 and len(vectors) <= 1 and len(tensors) == 1 + len(vectors)
    fits = fits and all(entry.dtype in DTYPES for entry in tensors.values())
    fits = fits and tensors[matrices[0]].shape == wanted and all(tensors[name].shape == wanted[:1] for name in vectors)
    if not fits:
        raise InputError(f"--router-weights {file} holds {found}; {expected}")
    if vectors and not moe.router_bias:
        raise InputError(f"--router-weights {file} holds a bias, {vectors[0]}; give the routers one: --router-bias")
    kernel = _read(tensors, matrices[0], file).T
    return LinearRouter(np.ascontiguousarray(kernel), _read(tensors, vectors[0], file) if vectors else None)


def _read(tensors: Mapping[str, TensorEntry], name: str, file: Path | str) -> np.ndarray:
    read = TensorFiles().read_strided(tensors[name]).astype(np.float32)
    check_finite(f"{file}: {name}", read, "mend the file")
    return read
