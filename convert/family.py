"""What a family of foreign checkpoints is, and how the one that a config belongs to is found."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from moe_jax.convert.foreign_config import ForeignConfig
from moe_jax.convert.table import Row, Table
from moe_jax.models import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Everything that differs between families. One file of `convert/families/` holds one, called `FAMILY`.

    Attributes:
      name: the `model_type` it reads and writes, and `ModelConfig.family` of what it read.
      architecture: the class of Transformers, written to `architectures`.
      defaults: what a key that a config leaves out means: the defaults of Transformers' config class.
      read: foreign config -> ModelConfig.
      write: ModelConfig -> the keys of config.json that say it; may raise `InputError` for what it cannot say.
      table: its tensors, in the order in which they are written.
      moe_format: name of the family in whose format a model of this one leaves once it has MoE layers.
    """

    name: str
    architecture: str
    defaults: Mapping[str, Any]
    read: Callable[[ForeignConfig], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    table: Table
    moe_format: str | None = None

    @property
    def holds_experts(self) -> bool:
        """Whether the format has MoE layers."""
        return any(isinstance(entry, Row) and "/experts/" in str(entry.leaves) for entry in self.table)
