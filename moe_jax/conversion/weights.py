"""Matches the tensors of a checkpoint with its family's table: none missing, none left over."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from moe_jax.conversion.families import family_named
from moe_jax.conversion.formats.checkpoint_files import CheckpointFiles
from moe_jax.conversion.formats.tensors import DTYPES, TensorEntry
from moe_jax.conversion.hf.hf_config import read_hf_config
from moe_jax.conversion.mapping_report import print_mapping
from moe_jax.conversion.table import PER_EXPERT, Ignored, Mapped, Piece, Table, Tied, apply_table, detect_layout
from moe_jax.core.errors import InputError, clipped, raise_if_any, shown
from moe_jax.files.json_toml import read_json_object
from moe_jax.models import ModelConfig


class Weights(NamedTuple):
    """A checkpoint in which every tensor has a known use.

    Attributes:
      tensors: positions of all tensors that fill a leaf.
      pieces: leaf path -> the pieces that fill it.
      layout: expert layout of the checkpoint.
      duplicates: tensors that must equal another one: name -> name of the other.
      ignored: tensors that are not converted: name -> reason.
    """

    tensors: dict[str, TensorEntry]
    pieces: dict[str, list[Piece]]
    layout: str
    duplicates: dict[str, str]
    ignored: dict[str, str]


def match_weights(
    checkpoint: CheckpointFiles,
    config: ModelConfig,
    leaves: Mapping[str, Any],
    where: str,
    *,
    table: Table | None = None,
    described_by: str = "config.json",
) -> Weights:
    """Matches a checkpoint's tensors with a model's leaves.

    Args:
      checkpoint: its files and tensors.
      config: of the model.
      leaves: leaf path -> anything with a `shape`, for every leaf of the model.
      where: for messages.
      table: of the tensors; None: that of the model's family.
      described_by: the file that the config was read from, for messages.

    Raises:
      InputError: listing every tensor that is missing, unexpected, misshapen or of a dtype we cannot read.
    """
    table = family_named(config.family).table_of(config) if table is None else table
    layout = detect_layout(table, checkpoint.tensors)
    mapped = apply_table(
        table, leaves, config.num_layers, layout, config.family, num_encoder_layers=config.num_encoder_layers
    )
    duplicates, ignored, unexpected = {}, {}, []
    for name in checkpoint.tensors:
        if name not in mapped.tensors:
            entry = _declared(table, name)
            if isinstance(entry, Tied):
                duplicates[name] = entry.equals
            elif isinstance(entry, Ignored):
                ignored[name] = entry.why
            else:
                unexpected.append(f"{clipped(name)} is unexpected")

    problems = [f"{name} is missing" for name in mapped.tensors if name not in checkpoint.tensors] + unexpected
    expected = {**mapped.tensors, **{name: mapped.tensors[other] for name, other in duplicates.items()}}
    problems += _shape_problems(checkpoint, expected, described_by)
    if not problems:
        problems = _mixed_dtypes(checkpoint, mapped)
    raise_if_any(problems, f"{where} does not hold the model its {described_by} describes")
    return Weights({name: checkpoint.tensors[name] for name in (*mapped.tensors, *duplicates)}, mapped.pieces,
                   layout, duplicates, ignored)  # fmt: skip


def _declared(table: Any, name: str) -> Tied | Ignored | None:
    """Returns the entry of the table that allows a tensor although it fills no leaf."""
    for entry in table:
        if isinstance(entry, Tied) and entry.tensor == name:
            return entry
        if isinstance(entry, Ignored) and re.fullmatch(entry.pattern, name):
            return entry
    return None


def _shape_problems(
    checkpoint: CheckpointFiles, expected: Mapping[str, tuple[int, ...]], described_by: str
) -> list[str]:
    problems = []
    for name, shape in expected.items():
        found = checkpoint.tensors.get(name)
        if found is not None and found.shape != shape:
            problems.append(f"{name} has shape {shown(list(found.shape))}, {described_by} says {list(shape)}")
        elif found is not None and found.dtype not in DTYPES:
            problems.append(f"{name} has dtype {found.dtype}, expected one of {', '.join(DTYPES)}")
    return problems


def _mixed_dtypes(checkpoint: CheckpointFiles, mapped: Mapped) -> list[str]:
    """Returns a problem for each leaf stacked from tensors of several dtypes, which it cannot hold bit for bit."""
    problems = []
    for leaf, pieces in mapped.pieces.items():
        dtypes = {checkpoint.tensors[piece.tensor].dtype for piece in pieces}
        if len(dtypes) > 1:
            problems.append(f"{leaf} would be stacked from tensors of dtypes {', '.join(sorted(dtypes))}")
    return problems


def print_expected(path: Path, dtype: str | None, ignored_keys: Collection[str], console: Console) -> None:
    """Prints the mapping of an absent checkpoint, in the per-expert layout.

    Args:
      path: its config.json, or the directory with that file.
      dtype: of all parameters after conversion; None: they keep that of the config.
      ignored_keys: unknown keys of config.json that are assumed to change nothing.
      console: where to print.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: if the config cannot be read.
    """
    from moe_jax.model_io.loading import leaf_specs

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no config at {file}")
    try:
        config = read_hf_config(read_json_object(file, allow=("nonfinite",)), ignored=ignored_keys)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    stored, leaves = leaf_specs(config), leaf_specs(config, dtype)
    mapped = apply_table(
        family_named(config.family).table_of(config),
        stored,
        config.num_layers,
        PER_EXPERT,
        config.family,
        num_encoder_layers=config.num_encoder_layers,
    )
    console.print(f"{file} has no weights beside it; a checkpoint of this config holds:", markup=False)
    print_mapping(mapped.pieces, mapped.tensors, leaves, stored, console)
