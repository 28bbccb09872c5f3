"""`ModelConfig`: a frozen, complete description of a model, and of what it sees with."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

from moe_jax.core.errors import InputError, check_member, check_number, check_positive, shown
from moe_jax.core.formatting import short_repr
from moe_jax.experts.shapes import FFNConfig
from moe_jax.functional.position_embeddings import RopeConfig
from moe_jax.images.image_config import ImageProcessing, PatchesConfig
from moe_jax.models.attention_config import AttentionConfig
from moe_jax.models.layer_config import LayerConfig
from moe_jax.models.linear_codes import EMBED, HEAD, LinearCodes, check_codes
from moe_jax.models.moe_config import MAX_EXPERTS, MoEConfig
from moe_jax.models.segments import show_layers

# Far above any known model, and low enough that a config of this size can be handled.
MAX_LAYERS = 10_000
MAX_FURTHER = 100

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that the parameters of a model may have."""


def check_num_layers(count: int) -> None:
    """Raises `InputError` unless a model can have this many layers; to be called before the layers are made."""
    if count < 1:
        raise InputError("a model needs at least one layer")
    if count > MAX_LAYERS:
        raise InputError(f"a model of {shown(count)} layers is not one that can be: {MAX_LAYERS:,} are the most")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model of three parts: embedding, stack of layers, head; and in some a second stack, an encoder.

        >>> attention = moe_jax.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
        >>> layers = (moe_jax.LayerConfig(attention=attention, mlp=moe_jax.FFNConfig(dim=32)),) * 2
        >>> config = moe_jax.ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=64, layers=layers)
        >>> config.num_layers, config.moe_layers
        (2, ())

    Attributes:
      family: the Hugging Face format that it was imported from and is exported to (`moe_jax/conversion/families/`).
      vocab_size, d_model: V and d.
      max_positions: the context length it was trained for.
      bounded_positions: rows longer than that are refused, as the model's behaviour beyond it is not computed here.
      layers: one description per layer; in a model with an encoder, first the encoder's layers and then the decoder's.
      num_encoder_layers: number of layers of the encoder, whose mask is `bidirectional`; the others, which have
        cross-attention, are the decoder's. Both stacks share the embedding. 0: there is no encoder.
      decoder_start_id: the token that a decoder begins with if there is an encoder.
      rope: rotary embedding of all layers that have none of their own; fraction 0: nothing is rotated.
      learned_positions: an embedding of every position up to `max_positions` is added to that of the token.
      embed_scale: token embeddings are multiplied by it.
      norm: `rms`, `rms_plus_one` (RMSNorm whose factors are `1 + scale`: Gemma), `layer` (LayerNorm with bias),
        `layer_unbiased` (without: Command R) or `none`, in all layers.
      norm_eps: epsilon inside the norms.
      final_norm: whether there is a norm after the last layer.
      tie_embeddings: the output head is the transposed embedding.
      head_bias: a bias on the output head.
      logit_scale: logits are multiplied by it.
      logit_soft_cap: scaled logits become `c tanh(logits / c)`; None: no cap.
      num_classes: the head scores classes and not tokens; None: it scores the vocabulary.
      head_hidden: before it scores, the head has a linear map d -> d with a bias, and tanh (classifiers of T5).
      bos_id, eos_ids: special tokens, where they are known.
      dtype: dtype of newly initialised parameters (a checkpoint keeps its own).
      balance_over: what balance losses are taken of: every `layer` has its own, and they are summed; or the whole
        `model` has one, of the loads and probabilities of all its layers together, times the k experts of a token.
      patches: the model is an image encoder (a *tower*): its tokens are patches of a picture, it has no vocabulary
        (`vocab_size` is 0) and no head, its attention sees all tokens and rotates none. None: its tokens are ids.
      vision: what the model sees with; None: it takes no pictures.
      further_layers: number of layers behind the last one that predict tokens after the next, each of its form
        (`nn.further`); what the model computes is the same without them.
      codes: `embed` and `lm_head`, if they are stored in codes.
      frozen_base: by default, only LoRA, adapters and the routers that choose among adapters are trained.
      foreign: keys of the source's config.json that are not used here, and are written back on export.
    """

    family: str
    vocab_size: int
    d_model: int
    max_positions: int
    layers: tuple[LayerConfig, ...]
    bounded_positions: bool = False
    num_encoder_layers: int = 0
    decoder_start_id: int | None = None
    rope: RopeConfig = RopeConfig()
    learned_positions: bool = False
    embed_scale: float = 1.0
    norm: Literal["rms", "rms_plus_one", "layer", "layer_unbiased", "none"] = "rms"
    norm_eps: float = 1e-5
    final_norm: bool = True
    tie_embeddings: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    num_classes: int | None = None
    head_hidden: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    balance_over: Literal["layer", "model"] = "layer"
    patches: PatchesConfig | None = None
    vision: "VisionConfig | None" = None
    further_layers: int = 0
    codes: tuple[LinearCodes, ...] = ()
    frozen_base: bool = False
    foreign: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, hash=False)

    def __post_init__(self) -> None:
        check_positive(
            self, "d_model", "max_positions", "num_classes", *(["vocab_size"] if self.patches is None else [])
        )
        check_number(self, "embed_scale", "logit_scale", "logit_soft_cap", above=0)
        check_number(self, "norm_eps", at_least=0)
        check_member("norm", self.norm, ("rms", "rms_plus_one", "layer", "layer_unbiased", "none"))
        check_member("dtype", self.dtype, DTYPES)
        check_member("balance_over", self.balance_over, ("layer", "model"))
        if self.num_classes is not None and self.tie_embeddings:
            raise InputError(f"a head for num_classes={self.num_classes} cannot be tied to the embedding")
        if self.num_classes is None and self.head_hidden:
            raise InputError("head_hidden is for heads that score classes, and num_classes is not given")
        special = [("bos_id", self.bos_id), ("decoder_start_id", self.decoder_start_id)]
        for name, token in [*special, *(("eos_ids", token) for token in self.eos_ids)]:
            if token is not None and not 0 <= token < self.vocab_size:
                raise InputError(f"{name}: token {shown(token)} is outside the vocabulary of {self.vocab_size} tokens")
        self._check_codes()
        check_num_layers(len(self.layers))
        experts = sum(self.moe(i).num_experts for i in self.moe_layers)
        if experts > MAX_EXPERTS:
            raise InputError(f"{experts:,} experts in all layers are not what can be: {MAX_EXPERTS:,} are the most")
        for i, layer in enumerate(self.layers):
            try:
                if not layer.is_recurrent:
                    self.rope_of(layer).check_fits(layer.softmax_attention.rope_dim, self.max_positions)
                if isinstance(layer.mlp, MoEConfig):
                    layer.mlp.bank.check_fits(layer.mlp.expert, self.d_model)
            except InputError as error:
                raise InputError(f"layer {i}: {error}") from None
        self._check_stacks()
        self._check_further()
        if self.patches is not None:
            self._check_tower(self.patches)

    def __repr__(self) -> str:
        return short_repr(self, layers=show_layers(self.layers))

    def _check_stacks(self) -> None:
        encoder = self.num_encoder_layers
        if not isinstance(encoder, int) or isinstance(encoder, bool) or not 0 <= encoder < len(self.layers):
            raise InputError(
                f"num_encoder_layers={shown(encoder)} must lie between 0 and {len(self.layers) - 1}: of "
                f"{len(self.layers)} layers at least one is a decoder's"
            )
        if (self.decoder_start_id is not None) != self.has_encoder:
            raise InputError(
                f"decoder_start_id={self.decoder_start_id} does not go with num_encoder_layers={encoder}: a decoder "
                "begins with such a token if there is an encoder, and only then"
            )
        for i, layer in enumerate(self.layers if self.has_encoder else ()):
            if i < encoder and (layer.cross is not None or layer.attention.mask != "bidirectional"):
                raise InputError(
                    f"layer {i} is an encoder's: its mask is 'bidirectional', and it has no cross-attention"
                )
            if i >= encoder and (layer.cross is None or layer.attention.mask == "bidirectional"):
                raise InputError(
                    f"layer {i} is a decoder's: it has cross-attention, and its mask is not 'bidirectional'"
                )
        for start, layers in ((0, self.layers[:encoder]), (encoder, self.layers[encoder:])):
            tables = {}
            for i, attention in enumerate((layer.attention for layer in layers), start):
                if isinstance(attention, AttentionConfig) and attention.relative_bias is not None:
                    tables.setdefault((attention.relative_bias, attention.num_heads, attention.mask), i)
            if len(tables) > 1:
                first, second, *_ = tables.values()
                raise InputError(
                    f"layers {first} and {second} of a stack share a table of relative biases, so they must have the "
                    "same relative_bias, num_heads and mask"
                )

    def _check_codes(self) -> None:
        check_codes(self.codes)
        known = (EMBED,) if self.tie_embeddings else (EMBED, HEAD)
        for path in (path for one in self.codes for path in one.paths):
            if path not in known:
                raise InputError(f"codes of {shown(path)}: beside its layers, this model has {' and '.join(known)}")
        if self.codes and (self.patches is not None or self.num_classes is not None or self.has_encoder):
            raise InputError("codes of embed and lm_head go with a decoder that scores tokens")

    def _check_further(self) -> None:
        count = self.further_layers
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_FURTHER:
            raise InputError(f"further_layers={shown(count)} must lie between 0 and {MAX_FURTHER}")
        last = self.layers[-1]
        plain = self.vision is None and self.patches is None and self.num_classes is None and not self.has_encoder
        if count and not (plain and last.attention.relative_bias is None and not self.learned_positions):
            raise InputError(
                f"further_layers={count} go with a decoder of texts that predicts tokens, without relative or learned "
                "positions"
            )

    def check_no_further(self, what: str) -> None:
        """Raises `InputError` for a model with further layers, which `what` does not know."""
        if self.further_layers:
            raise InputError(
                f"{what} does not know the model's further_layers={self.further_layers}, which predict tokens after "
                "the next; convert the model without them"
            )

    def _check_tower(self, patches: PatchesConfig) -> None:
        for i, layer in enumerate(self.layers):
            if layer.is_recurrent or layer.attention.mask != "bidirectional" or self.rope_of(layer).fraction:
                raise InputError(f"layer {i} of an image encoder: its mask is 'bidirectional', and it rotates nothing")
        if self.max_positions != patches.num_positions:
            raise InputError(
                f"an image encoder of {self.max_positions} positions for {patches.num_positions} patches and tokens"
            )
        if self.vocab_size or self.vision is not None or self.has_encoder or self.num_classes is not None:
            raise InputError("an image encoder has no vocabulary, no classes, no encoder and no vision of its own")

    @property
    def has_encoder(self) -> bool:
        """Whether the model has an encoder."""
        return self.num_encoder_layers > 0

    @property
    def encoder(self) -> "ModelConfig":
        """The encoder as a model of its own, with the same embedding."""
        assert self.has_encoder, "the model has no encoder"
        layers = self.layers[: self.num_encoder_layers]
        return dataclasses.replace(self, layers=layers, num_encoder_layers=0, decoder_start_id=None)

    @property
    def decoder(self) -> "ModelConfig":
        """The decoder; in a model without an encoder, the whole model."""
        if not self.has_encoder:
            return self
        layers = self.layers[self.num_encoder_layers :]
        return dataclasses.replace(self, layers=layers, num_encoder_layers=0, decoder_start_id=None)

    def check_no_encoder(self, what: str) -> None:
        """Raises `InputError` for a model with an encoder, which `what` does not support yet."""
        if self.has_encoder:
            raise InputError(f"{what} is not supported for a model with an encoder, as {self.family!r} models are")

    def check_no_tower(self, what: str) -> None:
        """Raises `InputError` for an image encoder, which `what` does not fit."""
        if self.patches is not None:
            raise InputError(f"a {self.family!r} model is an image encoder, and not {what}")

    def check_sees(self, what: str) -> "VisionConfig":
        """Returns what the model sees with; raises `InputError` for one that takes no pictures, which `what` needs."""
        if self.vision is None:
            raise InputError(f"{what}: this {self.family!r} model takes no pictures, it has no vision")
        return self.vision

    def check_whole_sequences(self, parts: int) -> None:
        """Raises `InputError` for a model that carries states along sequences, if a mesh splits these into parts."""
        if parts > 1 and self.recurrent_layers:
            raise InputError(
                f"mesh.sequence = {parts} splits every sequence, and layer {self.recurrent_layers[0]} carries a state "
                "along it; take mesh.sequence = 1, and fsdp for the memory"
            )

    def check_shared_choice(self, length: int) -> None:
        """Raises `InputError` for rows so long that layers would need the keys that another layer chose."""
        for i in self.softmax_layers:
            latent = self.layers[i].softmax_attention.latent
            indexer = None if latent is None else latent.indexer
            if indexer is not None and indexer.shared and length > indexer.top_k:
                raise InputError(
                    f"rows of {length} positions, but layer {i} takes the {indexer.top_k} tokens that the indexer of "
                    f"another layer chose, which is not supported; take rows of at most {indexer.top_k}"
                )

    def check_scores_tokens(self, what: str) -> None:
        """Raises `InputError` for a model whose head scores classes: `what` needs one that scores tokens."""
        if self.num_classes is not None:
            raise InputError(f"the model scores {self.num_classes} classes and not tokens, which {what} needs")

    def shared_bias(self) -> AttentionConfig | None:
        """The attention of the first layer with relative biases, whose table all share; of one stack only."""
        assert not self.has_encoder, "each of the two stacks has a table"
        biased = (one.softmax_attention for one in self.layers if one.attention.relative_bias is not None)
        return next(biased, None)

    @property
    def num_layers(self) -> int:
        """Number of layers, those of an encoder included."""
        return len(self.layers)

    @functools.cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that hold an MoE."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, MoEConfig))

    @property
    def softmax_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have attention, and no recurrence in its place."""
        return tuple(i for i, layer in enumerate(self.layers) if not layer.is_recurrent)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a recurrence in the place of attention."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.is_recurrent)

    @property
    def expert_counts(self) -> frozenset[int]:
        """The numbers of experts that MoE layers have."""
        return frozenset(self.moe(layer).routed_experts for layer in self.moe_layers)

    def moe(self, layer: int) -> MoEConfig:
        """Returns the MoE of a layer that has one."""
        mlp = self.layers[layer].mlp
        assert isinstance(mlp, MoEConfig), f"layer {layer} is dense"
        return mlp

    def ffn(self, layer: int) -> FFNConfig:
        """Returns the FFN of a dense layer."""
        mlp = self.layers[layer].mlp
        assert isinstance(mlp, FFNConfig), f"layer {layer} is an MoE"
        return mlp

    @property
    def num_outputs(self) -> int:
        """Number of logits that the head returns for a position."""
        return self.vocab_size if self.num_classes is None else self.num_classes

    def rope_of(self, layer: LayerConfig) -> RopeConfig:
        """Returns the rotary embedding of a layer with attention."""
        own = layer.softmax_attention.rope
        return self.rope if own is None else own


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The eye of a language model: an image encoder, the features taken of it, and a projector to its own width.

    Attributes:
      family: the Hugging Face format of the whole, around that of its language model, such as `llava`.
      tower: the image encoder, whose `patches` say how pictures become its tokens.
      processing: how pictures become the pixels of the tower.
      features: hidden states of the tower that are joined, entry after entry: 0 is the input of its first layer, -1
        what comes after the last one and the final norm.
      drop_first: tokens of the tower that are left out, from the first one: 1 where that is a class token.
      projector: steps from these features to those of the language model, as `nn.register_projector_step` names them,
        each perhaps with an argument: `("linear", "gelu", "linear")`, `("pixel_shuffle:4", "linear")`.
      placeholder: the token id that stands in a text for every feature of a picture; None: there is none.
      frame: texts that stand before and after these in a text, such as `("<img>", "</img>")`.
      foreign: as in `ModelConfig`.
    """

    family: str
    tower: ModelConfig
    processing: ImageProcessing
    features: tuple[int, ...] = (-2,)
    drop_first: int = 1
    projector: tuple[str, ...] = ("linear", "gelu", "linear")
    placeholder: int | None = None
    frame: tuple[str, str] = ("", "")
    foreign: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, hash=False)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        patches, layers = self.tower.patches, self.tower.num_layers
        if patches is None:
            raise InputError("the tower of a model that sees is an image encoder: its config has patches")
        if not self.features or not all(-layers - 1 <= index <= layers for index in self.features):
            raise InputError(
                f"features={shown(self.features)}: expected hidden states of a tower of {layers} layers, from "
                f"{-layers - 1} to {layers}"
            )
        rows, columns = self.grid
        if not 0 <= self.drop_first < rows * columns + patches.class_token:
            raise InputError(
                f"drop_first={shown(self.drop_first)}: a picture of {self.processing.size[0]} x "
                f"{self.processing.size[1]} pixels has {rows} x {columns} patches of {patches.size} x {patches.size}"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches that a picture has."""
        assert self.tower.patches is not None
        return self.tower.patches.grid_of(self.processing.size)

    @property
    def hidden_states(self) -> tuple[int, ...]:
        """The numbers of `features`, none of them negative."""
        return tuple(index % (self.tower.num_layers + 1) for index in self.features)
