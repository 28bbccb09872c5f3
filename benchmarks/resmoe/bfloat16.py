"""Models in bfloat16, as large MoEs are published: in float32 half of the bytes would be nobody's loss."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from moe_jax.loading import leaf_specs
from moe_jax.model_dir import ModelDirectoryWriter, new_lineage_entry, read_lineage
from moe_jax.model_source import ModelSource

DTYPE = "bfloat16"


def write_bfloat16(source: ModelSource, dst: Path) -> None:
    """Writes the model with all its floating-point leaves rounded."""
    config = dataclasses.replace(source.config, dtype=DTYPE)
    lineage = [*read_lineage(source.path), new_lineage_entry("convert", {"dtype": DTYPE}, [source])]
    with ModelDirectoryWriter(dst, config, tokenizer_files=source.tokenizer_files, lineage=lineage) as writer:
        for path in leaf_specs(config):
            leaf = source.read(path)
            writer.write({path: leaf.astype(DTYPE) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf})
