"""A model from the path that a user gives."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from moe_jax.errors import InputError

if TYPE_CHECKING:  # it imports JAX, and the command line answers --help without
    from moe_jax.model_source import ModelSource
    from moe_jax.models import ModelConfig


def open_source(path: Path | str) -> "ModelSource":
    """Opens a model directory, an adapter directory or a Hugging Face directory; the weights stay on disk.

    Raises:
      FileNotFoundError: if there is nothing at `path`.
      InputError: if it is neither, or its config cannot be read.
    """
    from moe_jax.adapter_dir import AdapterDirectory, is_adapter_directory
    from moe_jax.convert import HuggingFaceDirectory, is_hugging_face_directory
    from moe_jax.model_dir import ModelDirectory, is_model_directory

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no model at {path}")
    expected = "expected a model directory, or a Hugging Face directory with config.json and weights"
    if not path.is_dir():
        raise InputError(f"{path} is a file; {expected}")
    if is_adapter_directory(path):
        return AdapterDirectory(path)
    if is_model_directory(path):
        return ModelDirectory(path)
    if is_hugging_face_directory(path):
        return HuggingFaceDirectory(path)
    names = sorted(child.name for child in path.iterdir())
    listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    raise InputError(f"{path} is not a model: it holds {listed or 'nothing'}; {expected}")


def read_config(path: Path | str) -> "ModelConfig":
    """Reads a config without weights: ours or Hugging Face's, given as a file or as a directory with a config.json.

    Raises:
      FileNotFoundError: if there is nothing at `path`, or no config.json in it.
      InputError: if it is not a config that can be read.
    """
    from moe_jax.convert import read_hf_config
    from moe_jax.models import config_from_json
    from moe_jax.models.serialize import FORMAT

    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no config at {file}")
    try:
        data = json.loads(file.read_bytes())
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{file} holds a JSON {type(data).__name__}, expected an object")
    try:
        return config_from_json(data) if data.get("format") == FORMAT else read_hf_config(data)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
