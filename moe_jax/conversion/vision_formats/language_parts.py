"""Models of text and more whose language model alone is read: its config, and its tensors, are a part of theirs.

For a text without pictures or sounds it computes what the whole does: positions that have a row and a column, too, are
then all the same, and are those of the usual rotary embedding. It is exported in the format of its own family.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from moe_jax.conversion.table import FUSED, Ignored, Row, Table
from moe_jax.core.errors import InputError, shown

_ROPE_KEYS = ("rope_scaling", "rope_parameters")
_DTYPES = ("dtype", "torch_dtype")
# How a position is divided among time, row and column, which are equal for a token of a text.
_SECTIONS = ("mrope_section", "mrope_interleaved", "interleaved")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguagePart:
    """The place of a language model in a model of text and more.

    Attributes:
      name: the `model_type` of the whole.
      path: keys of config.json, each inside of the one before, under which the language model's config stands.
      families: the `model_type` that this config has, or may leave out, and the family that the model is of.
      names: beginnings of the names of its tensors in the whole, and those in their place in the family.
      left_out: beginnings of names of other tensors, and what they are of.
      defaults: values of keys that its config leaves out, where they are not those of the family.
      fixed: values of keys that the code of the whole does not read, as it computes.
      of_pictures: keys of its rotary embedding that count for pictures alone, and that the family has no word for.
      beside: keys of the whole that count for its language model, and their defaults, whatever its own config says.
      tied_by_names: where nothing says whether the head is the embedding, the names of tensors do.
      experts_as_kernels: fused experts may be stored as they are multiplied, [E, in, out]: published ones are, and
        those that Transformers saves may not be.
    """

    name: str
    families: Mapping[str, str]
    names: Mapping[str, str]
    left_out: Mapping[str, str]
    path: tuple[str, ...] = ("text_config",)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    of_pictures: tuple[str, ...] = ()
    beside: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"tie_word_embeddings": False})
    tied_by_names: bool = False
    experts_as_kernels: bool = False

    @property
    def where(self) -> str:
        """The place of its config, for messages and for options: `thinker_config.text_config`."""
        return ".".join(self.path)

    def keys(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the config of the language model alone, given that of the whole.

        Raises:
          InputError: if it is not there, or is that of a model of another family.
        """
        part: Any = data
        for key in self.path:
            part = part.get(key)
            if not isinstance(part, Mapping):
                raise InputError(f"config.json: {self.where!r} is {shown(part)}, expected the config of a model")
        given = part.get("model_type", next(iter(self.families)))
        if not isinstance(given, str) or given not in self.families:
            known = ", ".join(self.families)
            raise InputError(f"config.json: {self.where}.model_type is {shown(given)}, expected one of: {known}")
        beside = {key: data.get(key, default) for key, default in self.beside.items()}
        if not any(part.get(key) for key in _DTYPES):
            beside |= {key: data[key] for key in _DTYPES if key in data}
        keys = {**self.defaults, **part, **beside, **self.fixed, "model_type": self.families[given]}
        for key in _ROPE_KEYS:
            if isinstance(keys.get(key), Mapping):
                keys[key] = {name: value for name, value in keys[key].items() if name not in self.of_pictures}
                if "rope_theta" in keys[key] and "rope_theta" not in part:
                    keys.pop("rope_theta", None)  # a default, that of a file takes precedence over
        return keys

    def plain_name(self, tensor: str) -> str:
        """Returns the name of a tensor as its family has it; that of one that is left out stays."""
        if tensor.startswith(tuple(self.left_out)):
            return tensor
        for theirs, ours in self.names.items():
            if tensor.startswith(theirs):
                return ours + tensor.removeprefix(theirs)
        return tensor

    def table(self, family: Table, tensors: Mapping[str, tuple[int, ...]]) -> Table:
        """Returns the table of the family, with the layout of experts here, and what is left out.

        The `tensors` have plain names; their shapes tell one layout from the other.
        """
        if self.experts_as_kernels and _are_kernels(tensors):
            family = tuple(_as_kernels(entry) if isinstance(entry, Row) else entry for entry in family)
        others = (
            Ignored(f"{re.escape(start)}.*", f"of {what}: the language model alone is read")
            for start, what in self.left_out.items()
        )
        return (*family, *others)


def _are_kernels(tensors: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether fused experts are [E, in, out]: what goes in and what comes out of a layer are equally wide."""

    def shape_of(matrix: str) -> tuple[int, ...]:
        return next((shape for name, shape in tensors.items() if name.endswith(f"mlp.experts.{matrix}_proj")), ())

    into, out_of = shape_of("gate_up"), shape_of("down")
    return len(into) == len(out_of) == 3 and into[1] == out_of[2]


def _as_kernels(row: Row) -> Row:
    if row.layout != FUSED:
        return row
    return dataclasses.replace(row, transpose=False, side_by_side=not isinstance(row.leaves, str))


_VISION = "what the model sees with"
_HEARING = "what the model hears with"
_QWEN3_VL = {"num_key_value_heads": 32, "rope_theta": 500000.0, "max_position_embeddings": 128000}
_THINKER: dict[str, Any] = {
    "families": {"qwen3_omni_moe_text": "qwen3_moe"},
    "defaults": {"rope_theta": 1000000.0, "norm_topk_prob": True},
    "fixed": {"use_sliding_window": False},
    "of_pictures": _SECTIONS,
}

LANGUAGE_PARTS = {
    part.name: part
    for part in (
        LanguagePart(
            name="qwen3_vl",
            families={"qwen3_vl_text": "qwen3"},
            names={"model.language_model.": "model."},
            left_out={"model.visual.": _VISION},
            defaults=_QWEN3_VL,
            fixed={"use_sliding_window": False},
            of_pictures=_SECTIONS,
        ),
        LanguagePart(
            name="qwen3_vl_moe",
            families={"qwen3_vl_moe_text": "qwen3_moe"},
            names={"model.language_model.": "model."},
            left_out={"model.visual.": _VISION},
            defaults={
                **_QWEN3_VL,
                "num_key_value_heads": 16,
                "intermediate_size": 5632,
                "moe_intermediate_size": 1408,
                "num_experts_per_tok": 4,
            },
            fixed={"use_sliding_window": False, "norm_topk_prob": True},
            of_pictures=_SECTIONS,
            experts_as_kernels=True,
        ),
        *(
            LanguagePart(
                name=name,
                families={f"{name}_text": f"{name}_text"},
                names={"model.language_model.": "model."},
                left_out={"model.visual.": _VISION},
            )
            for name in ("qwen3_5", "qwen3_5_moe")
        ),
        LanguagePart(
            name="qwen3_omni_moe",
            path=("thinker_config", "text_config"),
            names={"thinker.": ""},
            left_out={
                "thinker.visual.": _VISION,
                "thinker.audio_tower.": _HEARING,
                **dict.fromkeys(("talker.", "code2wav."), "what the model speaks with"),
            },
            **_THINKER,
        ),
        LanguagePart(
            name="qwen3_omni_moe_thinker",
            names={},
            left_out={"visual.": _VISION, "audio_tower.": _HEARING},
            **_THINKER,
        ),
        LanguagePart(
            name="mistral3",
            families={one: one for one in ("mistral", "mistral4")},
            names={"language_model.": "", "model.language_model.": "model."},
            left_out={
                f"{prefix}{part}.": _VISION
                for prefix in ("", "model.")
                for part in ("vision_tower", "multi_modal_projector")
            },
            beside={"tie_word_embeddings": True},
            tied_by_names=True,
        ),
        LanguagePart(
            name="llama4",
            families={"llama4_text": "llama4_text"},
            names={"language_model.": ""},
            left_out=dict.fromkeys(("vision_model.", "multi_modal_projector."), _VISION),
            beside={},
        ),
        LanguagePart(
            name="gemma4",
            families={"gemma4_text": "gemma4_text"},
            names={"model.language_model.": "model."},
            left_out={
                **dict.fromkeys(("model.vision_tower.", "model.embed_vision."), _VISION),
                **dict.fromkeys(("model.audio_tower.", "model.embed_audio."), _HEARING),
            },
            beside={"tie_word_embeddings": True},
        ),
    )
}
"""By the `model_type` of the whole."""
