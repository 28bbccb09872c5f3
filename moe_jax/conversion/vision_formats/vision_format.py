"""The description of a format of models that see."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.table import Ignored, Row, Table, Tied
from moe_jax.core.errors import InputError, shown
from moe_jax.models import ImageProcessing, ModelConfig, VisionConfig


class Parts(NamedTuple):
    """Readers of the parts of a config.json.

    Attributes:
      model: returns the config of the language model, or of the image encoder, that stands under a key of config.json.
      processing: returns how pictures are processed for a tower, as the files beside the config say; given a function
        too, as they say when it has changed their keys.
      text: the config of the language model, in formats that have its keys beside those of what it sees with.
    """

    model: Callable[[str], ModelConfig]
    processing: Callable[..., ImageProcessing]
    text: ModelConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionFormat:
    """A format of models that see.

    Attributes:
      name: `VisionConfig.family` of models that were read, and the `model_type` that it reads and writes, unless that
        is a language model's (`text_key`).
      architecture: the class of Transformers, written to `architectures`.
      defaults: values of keys that a config leaves out.
      read: reads config.json, given its keys and `Parts`.
      write: returns the keys of config.json, given the model, and those of its language model and its tower.
      text_names: beginnings of the names of the language model's tensors alone, and those in their place here; the
        first one that fits counts.
      tower_prefix: stands before the names of the tower's.
      projector: rows of the projector, for a model.
      processor: keys of processor_config.json, with which Transformers writes placeholders into a text, beside how
        pictures are processed; None: the format has no such file.
      other_names: beginnings of names that some checkpoints have, and those of the table in their place; the first one
        that fits counts.
      harmless: keys of config.json that change nothing; those of an object in it as `object.key`.
      text_key: the key of config.json that the language model's config stands under; None: its keys stand beside those
        of what it sees with, and the family that they are of names this format (`Family.sees`).
      tower_key: the key that the tower's config stands under.
      completed: returns the keys of a config.json with the tower's config where the config only names it.
      completed_by_names: returns the keys of a config.json with what only the names of the tensors beside it say; None:
        they say nothing more.
      image_processor: returns the keys of an image processor of Transformers for a processing; None: as
        `write_processing`. Where it is given, the files of a source that say how pictures are processed are kept.
      config_pads: whether config.json says that pictures are padded, and not the file of the image processor.
      note: a line about what of the format is left undone; empty: nothing is.
    """

    name: str
    architecture: str
    defaults: Mapping[str, Any]
    read: Callable[[HFConfig, Parts], ModelConfig]
    write: Callable[[ModelConfig, VisionConfig, dict[str, Any], dict[str, Any]], dict[str, Any]]
    text_names: Mapping[str, str]
    tower_prefix: str
    projector: Callable[[VisionConfig], Table]
    processor: Callable[[VisionConfig], dict[str, Any]] | None = None
    other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    text_key: str | None = "text_config"
    tower_key: str = "vision_config"
    completed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda keys: keys
    completed_by_names: Callable[[Mapping[str, Any], Collection[str]], Mapping[str, Any]] | None = None
    image_processor: Callable[[ImageProcessing], dict[str, Any]] | None = None
    config_pads: bool = False
    note: str = ""

    def table(self, vision: VisionConfig, text: Table, tower: Table) -> Table:
        """Returns the table of the whole, from those of the language model and of the tower as they are alone.

        Raises:
          InputError: for a language model whose tensors have names that the format has no place for.
        """
        return (
            *(_renamed(one, self.text_names, self.name) for one in text),
            *self.projector(vision),
            *(_renamed(_below_tower(one), {"": self.tower_prefix}, self.name) for one in tower),
        )


def without_final_norm(tower: ModelConfig) -> ModelConfig:
    """Returns a tower whose norm after the last layer stands aside: no feature that a model sees with passes it.

    So Transformers has it: the `hidden_states` of its towers, the last of them too, are those before that norm.
    """
    assert tower.patches is not None, "a tower has patches"
    patches = dataclasses.replace(tower.patches, pooled_norm=tower.patches.pooled_norm or tower.final_norm)
    return dataclasses.replace(tower, final_norm=False, patches=patches)


def _renamed(entry: Row | Ignored | Tied, names: Mapping[str, str], format_name: str) -> Row | Ignored | Tied:
    def renamed(name: str, escape: Callable[[str], str] = str) -> str:
        for ours, theirs in names.items():
            if name.startswith(escape(ours)):
                return escape(theirs) + name.removeprefix(escape(ours))
        raise InputError(f"the format of {format_name!r} has no place for a tensor called {shown(name)}")

    if isinstance(entry, Ignored):
        # All alternatives of a pattern are prefixed; a beginning is renamed where it stands.
        pattern = f"(?:{entry.pattern})" if "" in names else entry.pattern
        return dataclasses.replace(entry, pattern=renamed(pattern, re.escape))
    if isinstance(entry, Tied):
        return Tied(renamed(entry.tensor), equals=renamed(entry.equals))
    return dataclasses.replace(entry, tensor=renamed(entry.tensor))


def _below_tower(entry: Row | Ignored | Tied) -> Row | Ignored | Tied:
    if not isinstance(entry, Row):
        return entry
    leaves = (entry.leaves,) if isinstance(entry.leaves, str) else entry.leaves
    moved = tuple(f"vision/tower/{leaf}" for leaf in leaves)
    return dataclasses.replace(entry, leaves=moved[0] if isinstance(entry.leaves, str) else moved, stack="tower")
