"""The expected tensors of a checkpoint, from its config.json alone, to look at before the weights are fetched."""

from collections.abc import Collection
from pathlib import Path

from rich.console import Console

from moe_jax.conversion.families import family_named
from moe_jax.conversion.hf.hf_config import read_hf_config
from moe_jax.conversion.mapping_report import print_mapping
from moe_jax.conversion.table import PER_EXPERT, apply_table
from moe_jax.core.errors import InputError
from moe_jax.files.json_toml import read_json_object


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
