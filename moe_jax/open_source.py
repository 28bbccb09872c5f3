"""A model from the path that a user gives."""

from pathlib import Path
from typing import TYPE_CHECKING

from moe_jax.errors import InputError

if TYPE_CHECKING:  # it imports JAX, and the command line answers --help without
    from moe_jax.model_source import ModelSource


def open_source(path: Path | str) -> "ModelSource":
    """Opens a model directory or a Hugging Face directory; the weights stay on disk.

    Raises:
      FileNotFoundError: if there is nothing at `path`.
      InputError: if it is neither, or its config cannot be read.
    """
    from moe_jax.convert import HuggingFaceDirectory, is_hugging_face_directory
    from moe_jax.model_dir import ModelDirectory, is_model_directory

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no model at {path}")
    expected = "expected a model directory, or a Hugging Face directory with config.json and weights"
    if not path.is_dir():
        raise InputError(f"{path} is a file; {expected}")
    if is_model_directory(path):
        return ModelDirectory(path)
    if is_hugging_face_directory(path):
        return HuggingFaceDirectory(path)
    names = sorted(child.name for child in path.iterdir())
    listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    raise InputError(f"{path} is not a model: it holds {listed or 'nothing'}; {expected}")
