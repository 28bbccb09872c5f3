"""The description of a family of models, and rows that most families' tables have."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.table import FUSED, PER_EXPERT, Ignored, Row, Table, Tied, linear, norm
from moe_jax.models import ModelConfig


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
      universal: the kind of universal FFN that every MoE of the format has; None: MoEs may have none.
      vocabulary: name of the file that its checkpoints have in place of a tokenizer.json, and a function that converts
        that file to one.
      classifier: how it stores models that score classes; None: it cannot.
      own_code: whether its code comes with its checkpoints, because Transformers has no class for it.
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
    universal: Literal["sigmoid"] | None = None
    vocabulary: tuple[str, Callable[[Path], str]] | None = None
    own_code: bool = False

    @property
    def classifier_architecture(self) -> str | None:
        """The class of Transformers for models that score classes; None: there is none."""
        stem = self.architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
        return None if self.classifier is None else f"{stem}ForSequenceClassification"

    def table_of(self, config: ModelConfig) -> Table:
        """Returns the table for a model: with the head that it has."""
        if config.num_classes is None:
            return self.table
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

    @property
    def holds_experts(self) -> bool:
        """Whether the format has MoE layers."""
        return any(isinstance(entry, Row) and "/experts/" in str(entry.leaves) for entry in self.table)

    @property
    def holds_dense_layers(self) -> bool:
        """Whether the format has layers with an FFN of their own."""
        return any(isinstance(entry, Row) and entry.leaves == "layers/{i}/mlp/down/kernel" for entry in self.table)


# --- rows -----------------------------------------------------------------------------------------

EMBEDDING: Table = (Row("model.embed_tokens.weight", "embed/embedding"),)

PROJECTIONS: Table = tuple(
    row
    for name in "qkvo"
    for row in linear(f"model.layers.{{i}}.self_attn.{name}_proj", f"layers/{{i}}/attention/{name}")
)

QK_NORMS: Table = (
    *norm("model.layers.{i}.self_attn.q_norm", "layers/{i}/attention/q_norm"),
    *norm("model.layers.{i}.self_attn.k_norm", "layers/{i}/attention/k_norm"),
)

PLAIN_ATTENTION: Table = (
    *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
    *PROJECTIONS,
    *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/mlp_norm"),
)

ATTENTION: Table = (*PLAIN_ATTENTION, *QK_NORMS)


def gated_ffn(theirs: str, ours: str) -> Table:
    """Returns the rows of a gated FFN, of the module `theirs` in the checkpoint."""
    return tuple(row for name in ("gate", "up", "down") for row in linear(f"{theirs}.{name}_proj", f"{ours}/{name}"))


GATED_FFN = gated_ffn("model.layers.{i}.mlp", "layers/{i}/mlp")

LM_HEAD: Table = (
    *linear("lm_head", "lm_head"),
    Tied("lm_head.weight", equals="model.embed_tokens.weight"),
    Ignored(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", "RoPE frequencies, recomputed from the config"),
)

HEAD: Table = (*norm("model.norm", "final_norm"), *LM_HEAD)


def gated_experts(block: str, gate: str, up: str, down: str) -> Table:
    """Returns the rows of the experts of an MoE layer, in both layouts in use.

    In the per-expert layout, they are in the module `block`, and their linear maps are called `gate`, `up` and `down`.
    """
    theirs, ours = f"model.layers.{{i}}.{block}.experts.{{e}}", "layers/{i}/mlp/experts"
    fused = "model.layers.{i}.mlp.experts"
    return (
        *linear(f"{theirs}.{gate}", f"{ours}/gate", PER_EXPERT),
        *linear(f"{theirs}.{up}", f"{ours}/up", PER_EXPERT),
        *linear(f"{theirs}.{down}", f"{ours}/down", PER_EXPERT),
        # Transformers 5 keeps the experts of a layer in two tensors, [E, 2f, d] and [E, d, f].
        Row(f"{fused}.gate_up_proj", (f"{ours}/gate/kernel", f"{ours}/up/kernel"), transpose=True, layout=FUSED),
        Row(f"{fused}.down_proj", f"{ours}/down/kernel", transpose=True, layout=FUSED),
    )
