"""Kept models in bfloat16, as large MoEs are published: in float32 half of the bytes would be nobody's loss."""

import dataclasses
import os
import shutil

import jax.numpy as jnp

from evidence.studies.jobs import Place
from evidence.studies.training_job import kept_path
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_dir import ModelDirectory, ModelDirectoryWriter

DTYPE = "bfloat16"


def rounded(place: Place, scale: str, name: str) -> ModelDirectory:
    """A kept model in bfloat16: its copy, which is made where there is none, or itself if it is kept so.

    Raises:
      FileNotFoundError: if the model is not there.
    """
    model = ModelDirectory(kept_path(place, scale, name))
    if model.config.dtype == DTYPE:
        return model
    copy = model.path.with_name(DTYPE)
    if not copy.exists():
        # Two workers may make it: the copies are equal, and the second is thrown away.
        own = model.path.with_name(f"{DTYPE}.{os.getpid()}")
        shutil.rmtree(own, ignore_errors=True)
        _write(model, own)
        try:
            own.rename(copy)
        except OSError:
            shutil.rmtree(own)
    return ModelDirectory(copy)


def _write(model: ModelDirectory, folder: os.PathLike[str]) -> None:
    config = dataclasses.replace(model.config, dtype=DTYPE)
    lineage = [*model.lineage, new_lineage_entry("convert", {"dtype": DTYPE}, [model])]
    with ModelDirectoryWriter(folder, config, tokenizer_files=model.tokenizer_files, lineage=lineage) as writer:
        for path in leaf_specs(config):
            leaf = model.read(path)
            writer.write({path: leaf.astype(DTYPE) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf})
