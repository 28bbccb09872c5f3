"""`ModelConfig`: a frozen, complete description of a model, and the segments of layers that repeat."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from moe_jax.core.errors import InputError, check_member, check_number, check_positive, shown
from moe_jax.core.formatting import short_repr
from moe_jax.experts.shapes import FFNConfig, NoFFNConfig
from moe_jax.functional.position_embeddings import RopeConfig
from moe_jax.images.image_config import ImageProcessing, PatchesConfig
from moe_jax.models.attention_config import PROJECTIONS as PROJECTIONS
from moe_jax.models.attention_config import AttentionConfig as AttentionConfig
from moe_jax.models.attention_config import IndexerConfig as IndexerConfig
from moe_jax.models.attention_config import LatentConfig as LatentConfig
from moe_jax.models.moe_config import MAX_EXPERTS
from moe_jax.models.moe_config import MoEConfig as MoEConfig
from moe_jax.models.moe_config import PerftConfig as PerftConfig
from moe_jax.models.own_parts import BLOCK, LAYERS
from moe_jax.models.recurrent_config import NoAttentionConfig, RecurrentConfig

NORM_POSITIONS = ("pre", "post", "output", "both")

# Far above any known model, and low enough that a config of this size can be handled.
MAX_LAYERS = 10_000
MAX_FURTHER = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: attention, perhaps cross-attention, then an FFN or an MoE, each with its norms.

        >>> attention = moe_jax.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
        >>> moe_jax.LayerConfig(attention=attention, mlp=moe_jax.FFNConfig(dim=32)).mlp.activation
        'silu'

    Attributes:
      attention: attention of the tokens to each other; or in its place a recurrence, such as the gated delta rule, or
        nothing (`NoAttentionConfig`).
      mlp: the FFN or the MoE; or nothing (`NoFFNConfig`).
      cross: attention to the output of an encoder, between the two; its mask is `bidirectional` and it rotates nothing.
      norm_position: where norms `n` stand around a branch `f`. `pre`: `x + f(n(x))`; `post`: `n(x + f(x))` (the first
        Transformers, BERT); `output`: `x + n(f(x))` (OLMo 2); `both`: `x + n'(f(n(x)))` (Gemma 2).
      parallel: attention and FFN have the same input, and both are added to it (GPT-J, Phi).
      shared_norm: both also have the same norm (`attention_norm`).
      branch_scales: what a branch adds is first multiplied, entry by entry, by a vector of its own (LayerScale, Touvron
        et al. 2021).
      residual_scale: what a branch adds is multiplied by it (Granite).
      output_scale: what the layer returns is multiplied by a number of its own, which is not trained (Gemma 4).
      module: `block`, or what `nn.register_layer` has added: the module of such a layer.
    """

    attention: AttentionConfig | RecurrentConfig
    mlp: FFNConfig | MoEConfig
    cross: AttentionConfig | None = None
    norm_position: Literal["pre", "post", "output", "both"] = "pre"
    parallel: bool = False
    shared_norm: bool = False
    branch_scales: bool = False
    residual_scale: float = 1.0
    output_scale: bool = False
    module: str = BLOCK

    __repr__ = short_repr

    def __post_init__(self) -> None:
        LAYERS.check("layer module", self.module)
        check_member("norm_position", self.norm_position, NORM_POSITIONS)
        if isinstance(self.attention, AttentionConfig) and self.attention.source_dim is not None:
            raise InputError(f"source_dim={self.attention.source_dim} is for cross-attention only")
        if self.parallel and (self.norm_position != "pre" or self.cross is not None):
            raise InputError("parallel attention and FFN go with norm_position 'pre' and without cross-attention")
        if self.branch_scales and (self.norm_position != "pre" or self.parallel):
            raise InputError("branch_scales go with norm_position 'pre', and attention and FFN one after the other")
        absent = [name for name in ("attention", "mlp") if name not in self.branches]
        if len(absent) > 1 or (absent and self.parallel):
            raise InputError("a layer needs attention, or a recurrence, or an FFN or MoE; one in parallel needs both")
        check_number(self, "residual_scale", above=0)
        if self.residual_scale != 1.0 and (self.norm_position != "pre" or self.parallel):
            raise InputError(
                f"residual_scale={self.residual_scale} goes with norm_position 'pre', and attention and FFN one after "
                "the other"
            )
        if self.norms_inside and (self.norm_position not in ("pre", "both") or self.parallel):
            raise InputError("branch_norm_eps goes with norm_position 'pre' or 'both', and with an MoE after attention")
        if self.shared_norm and not self.parallel:
            raise InputError("shared_norm is for attention and FFN in parallel")
        if self.cross is not None:
            cross = self.cross
            if cross.mask != "bidirectional" or cross.sliding_window is not None or cross.rope is not None:
                raise InputError(
                    "cross-attention sees all of the encoder's output: its mask must be 'bidirectional', and it has "
                    "neither sliding_window nor rope"
                )
            if cross.relative_bias is not None:
                raise InputError("cross-attention has no relative_bias: there is no distance between two sequences")
            if cross.nf4 or cross.lora is not None or cross.latent is not None:
                raise InputError("cross-attention has neither NF4 kernels nor LoRA nor latents")
            rotated = cross.rope_interleaved or cross.qk_norm in ("head_rotated", "head_unscaled")
            if cross.output_gate or cross.needs_positions or rotated or cross.values_are_keys or cross.value_norm:
                raise InputError(
                    "cross-attention rotates nothing and has no positions: neither output_gate nor rope_interleaved, "
                    "qk_norm of rotated heads, query_scale, block_tokens, values_are_keys or value_norm"
                )
            if self.is_recurrent:
                raise InputError("a recurrence in the place of attention goes without cross-attention")
            if self.softmax_attention.latent is not None:
                raise InputError("latent attention goes without cross-attention")

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of the branches that the layer has, in their order: `attention`, `cross_attention`, `mlp`."""
        return (
            *["attention"] * (not isinstance(self.attention, NoAttentionConfig)),
            *["cross_attention"] * (self.cross is not None),
            *["mlp"] * (not isinstance(self.mlp, NoFFNConfig)),
        )

    @property
    def is_recurrent(self) -> bool:
        """Whether a recurrence stands in the place of attention."""
        return isinstance(self.attention, RecurrentConfig)

    @property
    def softmax_attention(self) -> AttentionConfig:
        """The attention of a layer that has no recurrence in its place."""
        assert isinstance(self.attention, AttentionConfig), "the layer has a recurrence"
        return self.attention

    @property
    def recurrence(self) -> RecurrentConfig:
        """The recurrence of a layer that has one."""
        assert isinstance(self.attention, RecurrentConfig), "the layer has attention"
        return self.attention

    @property
    def norms_inside(self) -> bool:
        """Whether the norms of what the FFN or MoE is given are its own, and not the layer's."""
        return isinstance(self.mlp, MoEConfig) and self.mlp.branch_norm_eps is not None


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
    frozen_base: bool = False
    foreign: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, hash=False)

    def __post_init__(self) -> None:
        check_positive(
            self, "d_model", "max_positions", "num_classes", *(["vocab_size"] if self.patches is None else [])
        )
        check_number(self, "embed_scale", "logit_scale", "logit_soft_cap", above=0)
        check_number(self, "norm_eps", at_least=0)
        check_member("norm", self.norm, ("rms", "rms_plus_one", "layer", "layer_unbiased", "none"))
        check_member("dtype", self.dtype, ("float32", "bfloat16", "float16"))
        check_member("balance_over", self.balance_over, ("layer", "model"))
        if self.num_classes is not None and self.tie_embeddings:
            raise InputError(f"a head for num_classes={self.num_classes} cannot be tied to the embedding")
        if self.num_classes is None and self.head_hidden:
            raise InputError("head_hidden is for heads that score classes, and num_classes is not given")
        special = [("bos_id", self.bos_id), ("decoder_start_id", self.decoder_start_id)]
        for name, token in [*special, *(("eos_ids", token) for token in self.eos_ids)]:
            if token is not None and not 0 <= token < self.vocab_size:
                raise InputError(f"{name}: token {shown(token)} is outside the vocabulary of {self.vocab_size} tokens")
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
        return short_repr(self, layers=_shown_layers(self.layers))

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

    @property
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


MAX_PATTERN = 8


class Segment(NamedTuple):
    """`pattern` repeated `repeats` times, beginning at layer `start`."""

    start: int
    pattern: tuple[LayerConfig, ...]
    repeats: int

    def layer(self, repeat: int, position: int) -> int:
        """Returns the index in the model of the layer at `position` of the pattern, in the given repeat."""
        return self.start + repeat * len(self.pattern) + position


def segments_of(layers: tuple[LayerConfig, ...], *, cuts: Collection[int] = ()) -> tuple[Segment, ...]:
    """Divides the layers into segments, greedily: the repetition that covers most layers, short patterns first.

    Args:
      layers: the layers of a model, in order.
      cuts: layers at which a segment begins, whatever stands before and behind.

    Returns:
      Segments that cover the layers exactly once and in order. None crosses the boundary between an encoder's and a
      decoder's layers, which are never equal.
    """
    edges = sorted({0, *cuts, len(layers)})
    if len(edges) > 2:
        parts = [(first, segments_of(layers[first:end])) for first, end in itertools.pairwise(edges)]
        return tuple(one._replace(start=first + one.start) for first, part in parts for one in part)
    segments = []
    start = 0
    while start < len(layers):
        best = Segment(start, layers[start : start + 1], 1)
        for width in range(1, MAX_PATTERN + 1):
            pattern = layers[start : start + width]
            repeats = 1
            while layers[start + repeats * width : start + (repeats + 1) * width] == pattern:
                repeats += 1
            # A pattern that occurs once is not a repetition; choosing it could hide a longer run behind it.
            if repeats > 1 and repeats * width > best.repeats * len(best.pattern):
                best = Segment(start, pattern, repeats)
        segments.append(best)
        start += best.repeats * len(best.pattern)
    return tuple(segments)


# A screen holds about so many.
_MOST_SHOWN = 8


def _shown_layers(layers: tuple[LayerConfig, ...]) -> str:
    """Returns the layers in Python: `(LayerConfig(...),) * 32`; of many that differ, the first."""
    parts, room = [], _MOST_SHOWN
    for segment in segments_of(layers):
        if len(segment.pattern) > room:
            return " + ".join([*parts, f"... of {len(layers)} layers"])
        room -= len(segment.pattern)
        pattern = f"({', '.join(map(repr, segment.pattern))}{',' * (len(segment.pattern) == 1)})"
        parts.append(pattern if segment.repeats == 1 else f"{pattern} * {segment.repeats}")
    return " + ".join(parts)


def single_layers(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Returns the same layers in segments of one repeat each, for a program that does not scan over layers."""
    return tuple(
        Segment(segment.layer(repeat, 0), segment.pattern, 1)
        for segment in segments
        for repeat in range(segment.repeats)
    )
