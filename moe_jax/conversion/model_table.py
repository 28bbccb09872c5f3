"""The mapping table of a whole model: that of its family, and around it that of what it sees with."""

from collections.abc import Mapping
from typing import Any

from moe_jax.conversion.families import family_named
from moe_jax.conversion.families.mtp_tensors import further_rows
from moe_jax.conversion.table import Mapped, Table, apply_table
from moe_jax.conversion.vision_formats import vision_format_named
from moe_jax.models import ModelConfig


def table_of(config: ModelConfig, *, reading: bool = False) -> Table:
    """Returns the table of a model in the format of its family, or of the model that it sees with.

    Where a checkpoint is read, copies of tensors beside further layers need not be there (`further_rows`).
    """
    family = family_named(config.family)
    table = family.table_of(config)
    if config.vision is None:
        return (*table, *further_rows(family, config, reading=reading))
    tower = config.vision.tower
    return vision_format_named(config.vision.family).table(
        config.vision, table, family_named(tower.family).table_of(tower)
    )


def plain_name(config: ModelConfig, tensor: str) -> str:
    """Returns the name of a tensor as the table has it, given that of one of several ways to name it."""
    prefix, optional = "", family_named(config.family).optional_prefix
    if config.vision is not None:
        format_ = vision_format_named(config.vision.family)
        prefix = format_.tower_prefix
        for other, ours in format_.other_names.items():
            if tensor.startswith(other):
                tensor = ours + tensor.removeprefix(other)
                break
        optional = family_named(config.vision.tower.family).optional_prefix
    if not optional or not tensor.startswith(prefix + optional):
        return tensor
    return prefix + tensor.removeprefix(prefix + optional)


def mapped(config: ModelConfig, leaves: Mapping[str, Any], layout: str, *, table: Table | None = None) -> Mapped:
    """Returns the tensors of a model in its format, and the pieces that fill its leaves; see `apply_table`.

    The `table` is that of the model if none is given.
    """
    return apply_table(
        table_of(config) if table is None else table,
        leaves,
        config.num_layers,
        layout,
        config.family,
        num_encoder_layers=config.num_encoder_layers,
        num_tower_layers=0 if config.vision is None else config.vision.tower.num_layers,
    )
