"""The model of a run: written at its end, or read from a checkpoint (`RUN@STEP`) by everything that takes a model."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.checkpoints.saved_state import SavedState
from moe_jax.core.errors import InputError
from moe_jax.core.finite import cast
from moe_jax.data.pictures.picture_loading import picture_processing
from moe_jax.distributed.processes import first_decides
from moe_jax.distributed.sharding import path_name
from moe_jax.files.byte_files import fingerprint_leaves, sample_array
from moe_jax.files.staging import place_to_replace, replace_directory
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.adapter_dir import AdapterDirectory, AdapterDirectoryWriter
from moe_jax.model_io.in_memory import DecoderLeaves
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.loading import abstract_model, disk_paths, leaf_specs, may_be_cast, model_leaves
from moe_jax.model_io.model_dir import ModelDirectoryWriter, fingerprint_model
from moe_jax.model_io.model_source import ModelSource, OverBase
from moe_jax.models import ModelConfig, config_from_json
from moe_jax.nn import Decoder
from moe_jax.training import recipe_toml
from moe_jax.training.program import changed_paths, draw_model
from moe_jax.training.recipe import Recipe, load_recipe
from moe_jax.training.run_directory import (
    MODEL,
    RECIPE,
    RECORD,
    Restart,
    RunRecord,
    check_saved,
    files_of_run,
    restart_before,
    saved_steps,
)


def saved_config(run_dir: Path, step: int) -> ModelConfig:
    """Returns the config of the model of a checkpoint; raises as `check_saved`."""
    record, recipe = check_saved(run_dir, step), load_recipe(run_dir / RECIPE)
    return trained_config(_config_of(record, run_dir), recipe)


class SavedModel:
    """The model of a checkpoint, a `ModelSource`: the model that the run would leave if it ended at that step."""

    def __init__(self, run_dir: Path, step: int, source: ModelSource | None):
        """Opens the checkpoint; `source` is the model that the run was begun with, None if it was a config alone.

        Raises:
          FileNotFoundError: if there is no run.
          InputError: if there is no such checkpoint, or `source` is another model.
        """
        record = check_saved(run_dir, step)
        if source is not None and record.source is not None and source.fingerprint() != record.source.fingerprint:
            raise InputError(f"{source.path} is not the model that {run_dir} was begun with; name that with --base")
        self._recipe: Recipe = load_recipe(run_dir / RECIPE)
        self._config_at_first = _config_of(record, run_dir)
        self.config = trained_config(self._config_at_first, self._recipe)
        self._restarts = record.restarts
        self.path = run_dir.with_name(f"{run_dir.name}@{step}")
        self._run_dir, self._step, self._source = run_dir, step, source
        # The model whose weights training began with; None if they were drawn.
        self._begun_with = source if self._recipe.model.init == "checkpoint" else None
        self._state = SavedState(saved_steps(run_dir)[step])

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """The files that go with the model of the run."""
        return files_of_run(self._run_dir)

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """The lineage of the model that the run was begun with, and the run so far."""
        return lineage_of(self._recipe, self._source, {"steps": self._step}, self._restarts)

    @property
    def base(self) -> ModelSource | None:
        """The base of the adapter directory that the run was begun with; None for other runs."""
        return None if self._begun_with is None else self._begun_with.base

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every leaf, by path."""
        return self._specs

    def read(self, path: str) -> np.ndarray:
        """Reads one leaf, in the dtype in which the run would write it.

        Raises `InputError` if it cannot be read, or is too large for that dtype.
        """
        if path in self._trained:
            name, index = self._trained[path]
            exported = f"ema.{name.removeprefix('params.')}" if self._exports_average else name
            leaf = self._state.read(exported, index)
        else:
            leaf = self._frozen.read(path)
        return cast(path, cast(path, leaf, self._training_dtypes[path]), self._specs[path].dtype)

    def stored_bytes(self, path: str) -> int:
        """Number of bytes of one leaf, as the run would write it."""
        spec = self._specs[path]
        return spec.size * spec.dtype.itemsize

    def fingerprint(self) -> str:
        """Returns a SHA-256 of config and weights, as of a model directory with the same content."""
        leaves = fingerprint_leaves(self._specs, lambda path: sample_array(self.read(path)))
        return fingerprint_model(self.config, leaves)

    @property
    def _exports_average(self) -> bool:
        """Whether the run exports the average of the parameters; it begins with those of a checkpoint without one."""
        begun = restart_before(self._restarts, self._step)
        ema = self._recipe.ema
        return ema is not None and ema.export and (begun is None or begun.keeps_average)

    @cached_property
    def _trained(self) -> dict[str, tuple[str, int | None]]:
        """Name in the checkpoint of every leaf, and index of the layer if several layers are stacked there."""
        found, model = {}, abstract_model(self.config)
        trainable = changed_paths(self._recipe, model)
        specs = leaf_specs(self.config)
        for path, leaf in _parameters(model).items():
            if path not in trainable:
                continue
            leaves, name = disk_paths(self.config, path), _saved_name(path)
            if self._state.spec(name).shape != leaf.shape:
                raise InputError(
                    f"{name} of {self.path} has shape {self._state.spec(name).shape}, its config says {leaf.shape}"
                )
            stacked = len(leaf.shape) > len(specs[leaves[0]].shape)
            found |= {disk: (name, index if stacked else None) for index, disk in enumerate(leaves)}
        return found

    @cached_property
    def _frozen(self) -> ModelSource | DecoderLeaves:
        """The source of the parameters that were not trained, and therefore are not in the checkpoint."""
        if self._begun_with is not None:
            return self._begun_with
        config = dataclasses.replace(self.config, dtype=self._recipe.model.param_dtype)
        return DecoderLeaves(draw_model(config, self._recipe.seed))

    @cached_property
    def _training_dtypes(self) -> dict[str, jnp.dtype]:
        """Dtype in training of every leaf, by path."""
        frozen_dtype, dtypes = self._recipe.model.frozen_dtype, {}
        before = leaf_specs(self._config_at_first) if self._begun_with is None else self._begun_with.specs()
        for path in _parameters(abstract_model(self.config)):
            leaves = disk_paths(self.config, path)
            if leaves[0] in self._trained:
                dtype = self._state.spec(_saved_name(path)).dtype
            else:
                # Layers that are stacked in memory have the widest of their dtypes.
                dtype = jnp.result_type(*(before[leaf].dtype for leaf in leaves))
                if frozen_dtype and may_be_cast(leaves[0], dtype):
                    dtype = jnp.dtype(frozen_dtype)
            dtypes |= dict.fromkeys(leaves, dtype)
        return dtypes

    @cached_property
    def _specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        stored = None if self._begun_with is None else self._begun_with.specs()
        dtypes = {
            path: output_dtype(path, dtype, self._recipe, stored) for path, dtype in self._training_dtypes.items()
        }
        specs = leaf_specs(self.config)
        return {path: jax.ShapeDtypeStruct(spec.shape, dtypes[path]) for path, spec in specs.items()}


class SavedAdapters(SavedModel, OverBase):
    """The model of a checkpoint of a run that was begun with an adapter directory."""

    def own_specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of the leaves that the run would write: trained ones, and other adapters."""
        begun = self._begun_with
        before = begun.own_specs() if isinstance(begun, OverBase) else {}
        return {path: spec for path, spec in self._specs.items() if path in self._trained or path in before}


def open_saved(run_dir: Path, step: int, source: ModelSource | None) -> SavedModel:
    """Opens a checkpoint as a `SavedModel`, or as `SavedAdapters`."""
    saved = SavedModel(run_dir, step, source)
    return saved if saved.base is None else SavedAdapters(run_dir, step, source)


def _saved_name(path: str) -> str:
    """Returns the name in checkpoints of the parameter at a path in memory."""
    return f"params.{path.replace('/', '.')}.value"


def is_saved_by_layer(name: str) -> bool:
    """Whether a leaf of a checkpoint is a parameter of stacked layers, or its average: these are saved separately."""
    return name.startswith(
        tuple(f"{what}.{stack}.segments." for what in ("params", "ema") for stack in ("stack", "encoder"))
    )


def _config_of(record: RunRecord, run_dir: Path) -> ModelConfig:
    return config_from_json(dict(record.config), where=str(run_dir / RECORD))


def _parameters(model: Decoder) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns all parameters of an abstract model, by their paths in memory."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model))}


def write_model(
    model: Decoder,
    recipe: Recipe,
    source: ModelSource | None,
    files: Sequence[Path],
    measured: dict[str, Any],
    trainable: Collection[str],
    *,
    restarts: Sequence[Restart] = (),
) -> Path:
    """Writes `run_dir/model` and returns its path; an earlier one of the same run is replaced.

    If training started from an adapter directory, the output is an adapter directory over the same base. It holds the
    leaves that the first one held, and all others that were trained.

    Args:
      model: with the trained parameters, whose paths in memory are `trainable`.
      source: the model that training started from; its lineage is continued.
      files: files that go with the model, copied.
      measured, restarts: of the run, for the lineage.

    Raises:
      InputError: if parameters are not finite, or too large for the recipe's `output_dtype`.
    """
    target = as_path(recipe.run_dir) / MODEL
    started_from = source if recipe.model.init == "checkpoint" else None
    lineage = lineage_of(recipe, source, measured, restarts)
    # Where nothing takes the place of an earlier model at once, the checkpoint has all to write it again.
    fresh = as_path(first_decides(lambda: str(place_to_replace(target))))
    if isinstance(started_from, AdapterDirectory):
        trained = {name for path in trainable for name in disk_paths(model.config, path)}
        own = trained | started_from.own_specs().keys()
        writer = AdapterDirectoryWriter(
            fresh, model.config, base=started_from.base, trained=own, tokenizer_files=files, lineage=lineage
        )
    else:
        own = None
        writer = ModelDirectoryWriter(fresh, model.config, tokenizer_files=files, lineage=lineage)
    # Every process must make these calls, and writes the shards that it has.
    with writer:
        stored = None if started_from is None else started_from.specs()
        for path, leaf in _written_leaves(model, recipe, stored, own):
            if isinstance(leaf, jax.Array):
                writer.write_sharded(path, leaf, output_dtype(path, leaf.dtype, recipe, stored))
            else:
                writer.write({path: leaf})
    first_decides(lambda: replace_directory(target, fresh))
    return target


def lineage_of(
    recipe: Recipe, source: ModelSource | None, measured: Mapping[str, Any], restarts: Sequence[Restart]
) -> list[dict[str, Any]]:
    """Returns the lineage of a trained model; see `write_model`."""
    options = {key: value for key, value in recipe_toml.flatten(recipe).items() if value is not None}
    if restarts:
        options["restarts"] = [dataclasses.asdict(restart) for restart in restarts]
    if source is None or recipe.model.init != "checkpoint":
        return [new_lineage_entry("train", options, [], measured)]
    return [*source.lineage, new_lineage_entry("train", options, [source], measured)]


def trained_config(config: ModelConfig, recipe: Recipe) -> ModelConfig:
    """Returns the config of the trained model: with the recipe's coefficients, its way with pictures, its dtype."""
    begun_with = config.dtype if recipe.model.init == "checkpoint" else recipe.model.param_dtype
    if config.vision is not None:
        processing = picture_processing(recipe.data, config)
        config = dataclasses.replace(config, vision=dataclasses.replace(config.vision, processing=processing))
    return dataclasses.replace(recipe.moe.applied(config), dtype=recipe.model.output_dtype or begun_with)


def output_dtype(
    path: str, held: jnp.dtype, recipe: Recipe, stored: Mapping[str, jax.ShapeDtypeStruct] | None
) -> jnp.dtype:
    """Returns the dtype in which the trained model has a leaf, whose dtype in training is `held`.

    `stored` are the leaves of the model that training started from; None: it started from new weights.
    """
    if not may_be_cast(path, held):
        return held
    if recipe.model.output_dtype is not None:
        return jnp.dtype(recipe.model.output_dtype)
    return held if stored is None or path not in stored else stored[path].dtype


def _written_leaves(
    model: Decoder, recipe: Recipe, stored: Mapping[str, jax.ShapeDtypeStruct] | None, only: Collection[str] | None
) -> Iterator[tuple[str, np.ndarray | jax.Array]]:
    """Yields leaves, all or some, in the output dtype; leaves sharded over processes as they are in training."""
    for path, leaf in model_leaves(model):
        if only is not None and path not in only:
            continue
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            yield path, leaf
        else:
            leaf = np.asarray(leaf)
            yield path, cast(path, leaf, output_dtype(path, leaf.dtype, recipe, stored))
