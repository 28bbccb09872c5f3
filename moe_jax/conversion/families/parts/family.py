"""The description of a family, and common parts of most families: rows of their tables, usual keys of config.json."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from moe_jax.conversion.config_keys import HFConfig
from moe_jax.conversion.families.parts.rope_keys import read_rope, write_rope
from moe_jax.conversion.table import FUSED, PER_EXPERT, Ignored, Row, Table, Tied, linear, norm
from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig, RopeConfig
from moe_jax.models.config import check_num_layers

T = TypeVar("T")
Projection = Literal["q", "k", "v", "o"]


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
    """Everything that differs between families. Every file of this folder holds one, called `FAMILY`.

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


ACTIVATIONS: dict[str, Any] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}

# --- tables ---------------------------------------------------------------------------------------

EMBEDDING: Table = (Row("model.embed_tokens.weight", "embed/embedding"),)

PLAIN_ATTENTION: Table = (
    *norm("model.layers.{i}.input_layernorm", "layers/{i}/attention_norm"),
    *linear("model.layers.{i}.self_attn.q_proj", "layers/{i}/attention/q"),
    *linear("model.layers.{i}.self_attn.k_proj", "layers/{i}/attention/k"),
    *linear("model.layers.{i}.self_attn.v_proj", "layers/{i}/attention/v"),
    *linear("model.layers.{i}.self_attn.o_proj", "layers/{i}/attention/o"),
    *norm("model.layers.{i}.post_attention_layernorm", "layers/{i}/mlp_norm"),
)

ATTENTION: Table = (
    *PLAIN_ATTENTION,
    *norm("model.layers.{i}.self_attn.q_norm", "layers/{i}/attention/q_norm"),
    *norm("model.layers.{i}.self_attn.k_norm", "layers/{i}/attention/k_norm"),
)

GATED_FFN: Table = (
    *linear("model.layers.{i}.mlp.gate_proj", "layers/{i}/mlp/gate"),
    *linear("model.layers.{i}.mlp.up_proj", "layers/{i}/mlp/up"),
    *linear("model.layers.{i}.mlp.down_proj", "layers/{i}/mlp/down"),
)

LM_HEAD: Table = (
    *linear("lm_head", "lm_head"),
    Tied("lm_head.weight", equals="model.embed_tokens.weight"),
    Ignored(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", "RoPE frequencies, recomputed from the config"),
)

HEAD: Table = (*norm("model.norm", "final_norm"), *LM_HEAD)


def gated_experts(block: str, gate: str, up: str, down: str) -> Table:
    """Returns the rows of the experts of an MoE layer, in both layouts in use.

    Args:
      block: the module that holds router and experts in the per-expert layout, such as `mlp`.
      gate, up, down: names of an expert's linear maps there, such as `gate_proj`.
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


# --- reading config.json --------------------------------------------------------------------------


def read_attention(config: HFConfig, *, biases: Iterable[Projection] = (), **kwargs: Any) -> AttentionConfig:
    """Reads numbers of heads and head widths; further keywords go to `AttentionConfig`.

    Raises:
      InputError: if the width is not a multiple of the heads and no head_dim is given.
    """
    config.require("hidden_size", "num_attention_heads")
    d_model, num_heads = config.required_integer("hidden_size"), config.required_integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads")
    head_dim = config.integer("head_dim")
    if head_dim is None:
        if num_heads < 1 or d_model % num_heads:
            raise InputError(
                f"config.json: hidden_size={d_model} is not a multiple of num_attention_heads={num_heads}, "
                "and there is no head_dim"
            )
        head_dim = d_model // num_heads
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        biases=tuple(biases),
        **kwargs,
    )


def read_gated_ffn(
    config: HFConfig, *, dim: str = "intermediate_size", activation: str = "hidden_act", bias: bool = False
) -> FFNConfig:
    """Reads a gated FFN; `dim` and `activation` are the keys of its hidden width and its activation."""
    config.require(dim, activation)
    act = read_activation(config, activation)
    return FFNConfig(dim=config.required_integer(dim), gated=True, activation=act, bias=bias)


def read_activation(config: HFConfig, key: str = "hidden_act") -> Any:
    """Returns our name of the activation that `key` names.

    Raises:
      InputError: if there is none, or it is unknown.
    """
    config.require(key)
    name = config.text(key) or ""
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise InputError(f"config.json: unknown {key} {shown(name)}{nearest(name, ACTIVATIONS)}; known: {known}")
    return ACTIVATIONS[name]


def read_decoder(
    config: HFConfig,
    family: str,
    layers: Sequence[LayerConfig],
    *,
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms",
    eps: str = "rms_norm_eps",
    positions: str = "max_position_embeddings",
    rope: RopeConfig | None = None,
    **kwargs: Any,
) -> ModelConfig:
    """Reads the settings that all layers share; further keywords go to `ModelConfig`.

    Args:
      config: the Hugging Face config.
      family: becomes `ModelConfig.family`.
      layers: the layers, whose heads are all of one width.
      norm: kind of the norms.
      eps: key of their epsilon.
      positions: key of the context length.
      rope: rotary embedding of layers that have none of their own; None: read from the usual keys.
      **kwargs: settings without a key in config.json, because they are the same in the whole family.
    """
    config.require("vocab_size", "hidden_size", positions, eps)
    max_positions = config.required_integer(positions)
    vocab_size = config.required_integer("vocab_size")
    bos, eos = config.integer("bos_token_id"), config.integers("eos_token_id")
    # A default of the family beyond a smaller vocabulary means nothing; Transformers writes it all the same.
    if config.is_default("bos_token_id") and bos is not None and bos >= vocab_size:
        bos = None
    if config.is_default("eos_token_id"):
        eos = tuple(token for token in eos if token < vocab_size)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        d_model=config.required_integer("hidden_size"),
        max_positions=max_positions,
        layers=tuple(layers),
        rope=rope or read_rope(config, max_positions=max_positions, head_dim=layers[0].attention.rope_dim),
        norm=norm,
        norm_eps=config.required_number(eps),
        tie_embeddings=config.flag("tie_word_embeddings"),
        bos_id=bos,
        eos_ids=eos,
        dtype=read_dtype(config),
        foreign=config.unread_keys(),
        **kwargs,
    )


def repeat_layers(config: HFConfig, attention: AttentionConfig, mlp: FFNConfig | MoEConfig) -> list[LayerConfig]:
    """Returns `num_hidden_layers` equal layers."""
    return [LayerConfig(attention=attention, mlp=mlp)] * num_layers(config)


def num_layers(config: HFConfig) -> int:
    """Reads the number of layers, at least 1 and at most the largest possible number."""
    count = config.required_integer("num_hidden_layers")
    if count < 1:
        raise InputError(f"config.json: num_hidden_layers={count} must be at least 1")
    check_num_layers(count)
    return count


def read_dtype(config: HFConfig) -> Any:
    """Reads `dtype` (Transformers 5) or `torch_dtype` (4); a config with neither means float32."""
    new, old = config.text("dtype"), config.text("torch_dtype")
    return (new or old or "float32").removeprefix("torch.")


# --- writing config.json --------------------------------------------------------------------------


def write_decoder(config: ModelConfig, *, eps: str = "rms_norm_eps") -> dict[str, Any]:
    """Writes the keys that `read_decoder` and `read_attention` read."""
    attention = same_in_all_layers(config, "choice of heads (query, key-value, width)", _heads)
    eos = config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention[0],
        "num_key_value_heads": attention[1],
        "head_dim": attention[2],
        "max_position_embeddings": config.max_positions,
        eps: config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": eos,
        "torch_dtype": config.dtype,
        **write_rope(config.rope),
    }


def write_activation(ffn: FFNConfig) -> str:
    """Returns the name in Transformers of an FFN's activation."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == ffn.activation)


def same_in_all_layers(
    config: ModelConfig, what: str, get: Callable[[LayerConfig], T], *, among: Sequence[int] | None = None
) -> T:
    """Returns the one value of `get(layer)` over all layers, or over those whose indices are `among`.

    Raises:
      InputError: if layers differ, naming two that do.
    """
    indices = range(config.num_layers) if among is None else among
    first = get(config.layers[indices[0]])
    for i in indices:
        here = get(config.layers[i])
        if here != first:
            raise InputError(
                f"the format of {config.family!r} has one {what} for all layers, "
                f"but layer {indices[0]} has {first} and layer {i} has {here}"
            )
    return first


def dense_ffn(config: ModelConfig) -> FFNConfig:
    """Returns the FFN that all layers share.

    Raises:
      InputError: if a layer is an MoE, or layers differ.
    """
    if config.moe_layers:
        raise InputError(f"layer {config.moe_layers[0]} is an MoE, which the format of {config.family!r} cannot hold")
    same_in_all_layers(config, "FFN", lambda layer: layer.mlp)
    return config.ffn(0)


def uniform_moe(config: ModelConfig, *, among: Sequence[int] | None = None) -> MoEConfig:
    """Returns the MoE that all layers share, in the fields that formats with one kind of MoE layer store.

    Args:
      config: of the model.
      among: indices of the layers that are MoEs in the format; None: all.

    Raises:
      InputError: if one of them is dense, or they differ in number, size or routing of their experts.
    """
    indices = range(config.num_layers) if among is None else among
    for i in indices:
        if not isinstance(config.layers[i].mlp, MoEConfig):
            raise InputError(f"layer {i} is dense, but in the format of {config.family!r} every layer is an MoE")
    for what, get in (
        ("number of experts", lambda layer: layer.mlp.num_experts),
        ("number of experts per token", lambda layer: layer.mlp.top_k),
        ("gate", lambda layer: layer.mlp.gate),
        ("expert", lambda layer: layer.mlp.expert),
    ):
        same_in_all_layers(config, what, get, among=indices)
    return config.moe(indices[0])


def _heads(layer: LayerConfig) -> tuple[int, int, int]:
    attention = layer.attention
    return attention.num_heads, attention.num_kv_heads, attention.head_dim
