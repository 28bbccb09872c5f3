"""The description of a family of models."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.rope_keys import PARTIAL
from moe_jax.conversion.table import Ignored, Row, Table, Tied
from moe_jax.models import ImageProcessing, ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classifier:
    """How a format stores models whose head scores classes: with a class of their own, and another head.

    Attributes:
      head: rows of the head.
      prefix: stands before the names of all other tensors.
      fields: fields of `ModelConfig` that describe such a head.
    """

    head: Table
    prefix: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


SCORE = Classifier(head=(Row("score.weight", "lm_head/kernel", transpose=True),))
"""The classifier of all decoders of Transformers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Everything that differs between families. One that stands in a module of this folder is known by that.

    Attributes:
      name: the `model_type` it reads and writes, and `ModelConfig.family` of models that were read.
      architecture: the class of Transformers, written to `architectures`.
      defaults: values of keys that a config leaves out: the defaults of Transformers' config class.
      read: Hugging Face config -> ModelConfig.
      write: ModelConfig -> keys of config.json; may raise `InputError` for what the format cannot express.
      table: its tensors, in the order in which they are written.
      harmless: keys of config.json that change nothing in this family, besides those that change nothing in any
        (`hf.config_keys`) and those that `read` asks for or `defaults` names.
      moe_formats: names of families whose formats may hold a model of this family that has MoE layers; it is exported
        in the first that gives the same logits.
      balance_over: what the published code takes the balance loss of, whose coefficient is in config.json; see
        `ModelConfig`.
      universal: the kind of universal FFN that every MoE of the format has; None: MoEs may have none.
      vocabulary: name of the file that its checkpoints have in place of a tokenizer.json, and a function that converts
        that file to one.
      classifier: how it stores models that score classes; None: it cannot.
      further: keys of config.json that say how many layers stand behind the last one, to predict tokens after the next.
        They are no part of the decoder, and are left out unless they are asked for.
      further_form: how their tensors are called; None: they cannot be asked for.
      shapes: of tensors that have other axes than their leaves, by name, for a model; see `table.Row`.
      groups: number of groups of the tensors that have some columns of several leaves after each other, by name, for a
        model; see `table.Row`.
      optional_prefix: stands before the names of all tensors in some checkpoints, and in others not.
      within: the `model_type` of whole models that hold one of this family, and the key of its config there.
      processing: of an image encoder, how pictures of a height and width are processed where no file says it.
      own_code: whether its code comes with its checkpoints, because Transformers has no class for it.
      names: of keys that are called otherwise than in the family that `read` is taken from, by their names there.
      sees: the format of models that see whose keys stand in the same config.json; None: there is none.
      recurrent: whether its format has layers with a recurrence in the place of attention.
      one_branch: whether its layers have one branch each: a recurrence, attention, an FFN or an MoE.
      without_lora: last names of modules beside which PEFT refuses to put LoRA.
      completed: returns the keys of a config.json with what only the names of the tensors beside it say.
    """

    name: str
    architecture: str
    defaults: Mapping[str, Any]
    read: Callable[[HFConfig], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    table: Table
    harmless: tuple[str, ...] = ()
    moe_formats: tuple[str, ...] = ()
    classifier: Classifier | None = None
    balance_over: Literal["layer", "model"] = "layer"
    universal: Literal["sigmoid"] | None = None
    vocabulary: tuple[str, Callable[[Path], str]] | None = None
    further: tuple[str, ...] = ()
    further_form: Literal["deepseek"] | None = None
    shapes: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]] = lambda config: {}
    groups: Callable[[ModelConfig], Mapping[str, int]] = lambda config: {}
    optional_prefix: str = ""
    within: tuple[str, str] | None = None
    processing: Callable[[int], ImageProcessing] | None = None
    own_code: bool = False
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sees: str | None = None
    recurrent: bool = False
    one_branch: bool = False
    without_lora: tuple[str, ...] = ()
    completed: Callable[[Mapping[str, Any], Collection[str]], Mapping[str, Any]] | None = None

    @property
    def classifier_architecture(self) -> str | None:
        """The class of Transformers for models that score classes; None: there is none."""
        stem = self.architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
        return None if self.classifier is None else f"{stem}ForSequenceClassification"

    def table_of(self, config: ModelConfig) -> Table:
        """Returns the table for a model: with the head that it has, and the shapes of its tensors."""
        if config.num_classes is None:
            shapes, groups = self.shapes(config), self.groups(config)
            return tuple(
                dataclasses.replace(one, shape=shapes.get(one.tensor), groups=groups.get(one.tensor, 1))
                if isinstance(one, Row) and (one.tensor in shapes or one.tensor in groups)
                else one
                for one in self.table
            )
        assert self.classifier is not None, "the config was read, or compared with what can be written"
        prefix = self.classifier.prefix
        rest: list[Row | Ignored | Tied] = []
        for entry in self.table:
            if isinstance(entry, Row) and not str(entry.leaves).startswith("lm_head/"):
                rest.append(dataclasses.replace(entry, tensor=prefix + entry.tensor))
            elif isinstance(entry, Ignored):
                rest.append(Ignored(re.escape(prefix) + entry.pattern, entry.why))
            elif isinstance(entry, Tied) and entry.tensor != "lm_head.weight":
                rest.append(Tied(prefix + entry.tensor, equals=prefix + entry.equals))
        return (*rest, *self.classifier.head)

    def left_out(self, config: ModelConfig, keys: Mapping[str, Any]) -> Table:
        """Returns entries for the `further` layers of a checkpoint whose config.json has these keys."""
        if config.further_layers:
            return ()
        count = self.count_further(keys)
        layers = "|".join(str(config.num_layers + number) for number in range(count))
        why = "of a layer that predicts tokens after the next, which is no part of the decoder"
        return (Ignored(rf"model\.layers\.({layers})\..*", why),) if layers else ()

    def count_further(self, keys: Mapping[str, Any]) -> int:
        """Returns the number of `further` layers of a checkpoint whose config.json has these keys."""
        given = [keys[key] or 0 for key in self.further if key in keys]
        return max(given) if given else min(1, len(self.further))  # published checkpoints have one

    @property
    def rotates_parts(self) -> bool:
        """Whether the format says what share of each head is rotated; in all other formats, whole heads are."""
        return self.names.get(PARTIAL, PARTIAL) in self.defaults

    @property
    def holds_experts(self) -> bool:
        """Whether the format has MoE layers."""
        return any(isinstance(entry, Row) and "/experts/" in str(entry.leaves) for entry in self.table)

    @property
    def holds_dense_layers(self) -> bool:
        """Whether the format has layers with an FFN of their own."""
        return any(isinstance(entry, Row) and entry.leaves == "layers/{i}/mlp/down/kernel" for entry in self.table)
