"""Opens the model at a path, whatever its format."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from moe_jax.core.errors import InputError, clipped
from moe_jax.files.json_toml import read_json_object
from moe_jax.files.staging import check_model_path
from moe_jax.files.storage_path import as_path, nearest_path
from moe_jax.model_io.lineage import local_model
from moe_jax.model_io.model_names import why_a_path

if TYPE_CHECKING:  # they import JAX, and `--help` should answer without it
    from moe_jax.conversion.checkpoint_source import CodesInside
    from moe_jax.model_io.model_source import ModelSource
    from moe_jax.models import ModelConfig
    from moe_jax.training.recipe import Recipe

_EXPECTED = "expected a model directory, a Hugging Face directory with config.json and weights, or a GGUF file"


def open_source(path: Path | str, *, base: Path | str | None = None, towers: bool = False) -> "ModelSource":
    """Opens a model directory, an adapter directory, a Hugging Face directory, a GGUF file or a checkpoint of a run.

    The weights stay on disk.

    Args:
      path: the directory or file; of a checkpoint of a training run, `RUN@STEP`; of a model on the Hugging Face Hub,
        which is fetched first, `org/name` or `org/name@revision`.
      base: the path now of the model that this one needs: the base of an adapter directory, or the model that the run
        was begun with. By default the path in base.json or run.json.
      towers: whether it may be an image encoder.

    Raises:
      FileNotFoundError: if there is nothing at `path`.
      InputError: if it is none of these, its config cannot be read, the base is missing or another model than the one
        it was made for, or a base is given for a directory that has none; or for an image encoder, unless it may be.
    """
    source = _open(path, base)
    if not towers:
        check_language_model(source.config, path)
    return source


def check_language_model(config: "ModelConfig", path: Path | str) -> None:
    """Raises `InputError` if the model at `path` is an image encoder."""
    try:
        config.check_no_tower("a language model")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _open(path: Path | str, base: Path | str | None) -> "ModelSource":
    from moe_jax.conversion import GGUFModel, HuggingFaceDirectory, is_gguf, is_hugging_face_directory
    from moe_jax.model_io.adapter_dir import AdapterDirectory, is_adapter_directory
    from moe_jax.model_io.model_dir import ModelDirectory, is_model_directory
    from moe_jax.model_io.model_names import split_step
    from moe_jax.training.run_directory import describe_run

    check_model_path(path)
    path = as_path(path)
    saved = split_step(path)
    if saved is not None:
        return _open_saved(*saved, base)
    path = as_path(local_model(path))
    if not path.exists():
        raise FileNotFoundError(f"no model at {path}{path.absence}{why_a_path(path)}{nearest_path(path)}")
    if is_gguf(path):
        if base is not None:
            raise InputError(f"{path} is not an adapter directory, and has no base; leave out {clipped(str(base))}")
        return GGUFModel(path)
    if not path.is_dir():
        raise InputError(f"{path} is a file; {_EXPECTED}")
    if is_adapter_directory(path):
        return AdapterDirectory(path, open_source(_base_of(path) if base is None else _no_adapter(path, as_path(base))))
    if base is not None:
        raise InputError(f"{path} is not an adapter directory, and has no base; leave out {clipped(str(base))}")
    if is_model_directory(path):
        return ModelDirectory(path)
    if is_hugging_face_directory(path):
        return HuggingFaceDirectory(path)
    if (run := describe_run(path)) is not None:
        raise InputError(run)
    if (path / "config.json").exists():
        read_json_object(path / "config.json", allow=("nonfinite",))  # says why it could not be read, if that is so
        raise InputError(f"{path / 'config.json'} has neither format nor model_type nor architectures; {_EXPECTED}")
    if not path.renames:
        raise InputError(
            f"{path} is not complete: config.json, which is written last, is not there; give the command that makes it "
            "again, or copy the rest"
        )
    names = sorted(child.name for child in path.iterdir())
    listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    raise InputError(f"{path} is not a model: it holds {clipped(listed) or 'nothing'}; {_EXPECTED}")


def open_recipe_model(recipe: "Recipe", *, begins: bool = False) -> "tuple[ModelSource | None, ModelConfig]":
    """Opens the model that a recipe trains; None with the config alone, if it is begun with new weights.

    Raises `InputError` if training `begins`, and the recipe names no weights to begin with.
    """
    if begins and recipe.model.path is None and recipe.model.init == "checkpoint":
        raise InputError('model.config has no weights: give model.path, or model.init = "random" to draw new ones')
    if recipe.model.path is not None:
        source = open_source(recipe.model.path, base=recipe.model.base)
        return source, source.config
    assert recipe.model.config is not None
    config = read_config(recipe.model.config)
    check_language_model(config, recipe.model.config)
    return None, config


def _open_saved(run_dir: Path, step: int, base: Path | str | None) -> "ModelSource":
    """Opens a checkpoint of a run."""
    from moe_jax.training.run_directory import check_saved
    from moe_jax.training.saved_model import open_saved

    record = check_saved(run_dir, step)
    if record.source is None:
        if base is not None:
            raise InputError(f"{run_dir} was begun with a config alone; leave out {clipped(str(base))}")
        return open_saved(run_dir, step, None)
    place = record.source.locate(run_dir) if base is None else as_path(base)
    try:
        return open_saved(run_dir, step, open_source(place))
    except FileNotFoundError:
        raise InputError(f"{run_dir} was begun with {place}, which is not there; say with --base where it is") from None


def _base_of(adapter: Path) -> Path:
    """Returns the path of the base that base.json of an adapter directory names."""
    from moe_jax.model_io.adapter_dir import BASE_FILE, read_base_reference

    base = read_base_reference(adapter).locate(adapter)
    if not base.exists():
        raise InputError(
            f"{adapter} stands on {base}, which is not there; say with --base where it is, put it back, or change "
            f'"path" in {adapter / BASE_FILE}'
        )
    return _no_adapter(adapter, base)


def _no_adapter(adapter: Path, base: Path) -> Path:
    from moe_jax.model_io.adapter_dir import is_adapter_directory

    if is_adapter_directory(base):
        raise InputError(f"the base of {adapter} is {base}, an adapter directory itself; merge that first")
    return base


def codes_at(path: Path | str) -> "CodesInside | None":
    """Counts the tensors in codes of the model that `read_config` reads the config of; None: it is not quantised.

    Of weights, only the headers are read; if there are none, or they cannot be read, kinds are not known.
    """
    from moe_jax.conversion import GGUFModel, HuggingFaceDirectory, is_gguf
    from moe_jax.conversion.checkpoint_source import CodesInside
    from moe_jax.conversion.formats import format_of
    from moe_jax.conversion.hugging_face_dir import has_weights
    from moe_jax.model_io.model_names import split_step
    from moe_jax.models.serialize import FORMAT

    path = as_path(path)
    if split_step(path) is not None:
        return None
    path = as_path(local_model(path, weights=False))
    if is_gguf(path):
        return GGUFModel(path).codes_inside()
    data = read_json_object(path / "config.json" if path.is_dir() else path, allow=("nonfinite",))
    if data.get("format") == FORMAT:
        return None
    with contextlib.suppress(InputError, OSError):
        if path.is_dir() and has_weights(path):
            return HuggingFaceDirectory(path).codes_inside()
    return None if format_of(data) is None else CodesInside({})


def read_config(path: Path | str) -> "ModelConfig":
    """Reads a config without weights: ours or Hugging Face's, a file, a directory with one, a GGUF file, or `RUN@STEP`.

    For a model on the Hugging Face Hub, `org/name` or `org/name@revision`, only the config is fetched.

    Raises:
      FileNotFoundError: if there is nothing at `path`, or no config.json in it.
      InputError: if it is not a config that can be read.
    """
    from moe_jax.conversion import GGUFModel, is_gguf, read_hf_config
    from moe_jax.model_io.model_names import split_step
    from moe_jax.models import config_from_json
    from moe_jax.models.serialize import FORMAT

    check_model_path(path)
    path = as_path(path)
    if (saved := split_step(path)) is not None:
        from moe_jax.training.saved_model import saved_config

        return saved_config(*saved)
    path = local_model(path, weights=False)
    if is_gguf(path):
        return GGUFModel(path).config
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no config at {file}{why_a_path(path)}{nearest_path(path)}")
    data = read_json_object(file, allow=("nonfinite",))
    if data.get("format") == FORMAT:
        return config_from_json(data, where=str(file))
    try:
        return read_hf_config(data)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
