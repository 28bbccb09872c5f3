"""The model that a `ModelConfig` describes, for every family: embedding, stack and head, and in some an encoder.

For generation there is the same model with arrays of its own in every layer (`unstacked`). A scan over stacked layers
copies every layer's parameters out of the stack on each turn. In training this is negligible beside the work on many
tokens. For a single generated token it is as much as the work itself, and it copies all experts where few are used. So
generation runs a program that loops over no layers, unless these are codes, which are not copied
(`generation.layer_loop`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt8

from moe_jax.core.errors import InputError
from moe_jax.experts.summaries import Summarised, size_of
from moe_jax.functional import keys
from moe_jax.functional.cross_entropy import Distillation, DistilledLoss
from moe_jax.models.config import ModelConfig
from moe_jax.nn.block_stack import BlockStack
from moe_jax.nn.context import Caches, StackInputs
from moe_jax.nn.further.further_layer import FurtherLayer
from moe_jax.nn.inputs import (
    Batch,
    Ids,
    as_array,
    as_ids,
    check_key,
    check_range,
    model_inputs,
    targets_and_weights,
    warn_of_length,
)
from moe_jax.nn.inside import ChangeLogits, TokenRouting
from moe_jax.nn.layer_views import Layers
from moe_jax.nn.layer_words import layer_lines
from moe_jax.nn.layers import Embed, Head, Table
from moe_jax.nn.moe import Router, StackedStats, sum_of_losses
from moe_jax.nn.sown import forget_captures
from moe_jax.nn.stack import Stack, StackOutput
from moe_jax.nn.vision import Vision, splice


class DecoderOutput(NamedTuple):
    """Attributes:
    logits: float32; of the last position only, if asked for.
    caches: updated caches, or None without caches.
    router: statistics of the routers (see `StackedStats`); if an encoder ran in the same call, its statistics come
      first.
    routing: by layer, what the router of its MoE decided for every token; empty unless asked for. An encoder's are not
      among them: `encode` returns those.
    hidden_states: by layer, its inputs, for those that were asked for.
    """

    logits: Float[Array, "B T V"]
    caches: Caches | None
    router: StackedStats
    routing: dict[int, TokenRouting]
    hidden_states: dict[int, Float[Array, "B T d"]]


class Encoded(NamedTuple):
    """Attributes:
    output: of the encoder, after its final norm: the sequence that cross-attention attends to.
    valid: tokens of it that are not padding; None: all.
    router: statistics of the encoder's routers (see `StackedStats`).
    routing, hidden_states: by layer of the encoder, where asked for, and otherwise empty; see `Stack`.
    """

    output: Float[Array, "B S d"]
    valid: Bool[Array, "B S"] | None
    router: StackedStats
    routing: dict[int, TokenRouting]
    hidden_states: dict[int, Float[Array, "B S d"]]


class DecoderInputs(StackInputs, total=False):
    """Keyword arguments of `Decoder`, which explains them, beside its tokens: those of its stack, and more."""

    inputs: Ids | None
    inputs_valid: Bool[Array, "B S"] | None
    embeddings: Float[Array, "B T d"] | None
    pixels: UInt8[Array, "B M H W 3"] | None
    features: Float[Array, "B M n w"] | None
    slots: Int[Array, "B T"] | None
    caches: Caches | None
    key: Array | None


class CallInputs(DecoderInputs, total=False):
    """Keyword arguments of a call of `Decoder`, which explains them, beside its tokens."""

    last_only: Int[Array, " B"] | None


class Decoder(Summarised):
    """From tokens to logits: `Embed`, `Stack` and `Head`, each of which can be used alone.

        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> decoder = moe_jax.Decoder(moe_jax.tiny_model(experts=4).config, rngs=nnx.Rngs(0))
        >>> decoder(jnp.zeros((2, 5), jnp.int32)).logits.shape
        (2, 5, 64)

    Where the config has an encoder, the model has a second `Stack`, `encoder`, that runs over tokens of its own with
    the same embedding; the decoder attends to its output. Training and evaluation give both sequences in one call:

        model(tokens, inputs=inputs, inputs_valid=inputs_valid)

    `tokens` are the decoder's input: `config.decoder_start_id`, then the target without its last token. To encode
    once and decode step by step:

        encoded = model.encode(inputs, valid=inputs_valid)
        caches = init_cache(config, batch, slots, dtype, source_slots=inputs.shape[1])
        out = model(first, encoder_output=encoded.output, encoder_valid=encoded.valid, caches=caches, ...)
        out = model(next, encoder_valid=encoded.valid, caches=out.caches, positions=...)

    Attributes:
      config: the description that the model was built from.
      further: where the config has `further_layers`, these; a call does not apply them (`nn.further`).
      compute_dtype: dtype of the activations; parameters keep their own and are cast where they are used.
    """

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, compute_dtype: DTypeLike = jnp.float32, remat: str = "none"
    ):
        """Draws the parameters; `remat` as in `Stack`."""
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.embed = Embed(config, rngs=rngs, compute_dtype=compute_dtype)
        self.stack = Stack(config.decoder, rngs=rngs, remat=remat)
        self.lm_head = Head(config, rngs=rngs)
        if config.has_encoder:
            self.encoder = Stack(config.encoder, rngs=rngs, remat=remat)
        if config.further_layers:
            dtype = jnp.dtype(config.dtype)
            self.further = nnx.List(
                [FurtherLayer(config, rngs=rngs, dtype=dtype) for _ in range(config.further_layers)]
            )
        if config.vision is not None:
            self.vision = Vision(
                config.vision,
                config.d_model,
                rngs=rngs,
                dtype=jnp.dtype(config.dtype),
                remat=remat,
                compute_dtype=compute_dtype,
            )

    def _summary(self) -> list[str]:
        config, both = self.config, self.config.has_encoder
        tied = ", which is also the head" if config.tie_embeddings else ""
        scored = "tokens" if config.num_classes is None else "classes"
        return [
            f"{config.family}, {config.num_layers} layers of width {config.d_model:,}, {size_of(self)}, computes in "
            f"{self.compute_dtype}",
            f"embedding of {config.vocab_size:,} tokens{tied}",
            *([f"encoder {line}" for line in layer_lines(self.encoder.segments)] if both else []),
            *(f"{'decoder ' if both else ''}{line}" for line in layer_lines(self.stack.segments)),
            *([] if tied else [f"head of {config.num_outputs:,} {scored}"]),
            *([f"{config.further_layers} further layers"] if config.further_layers else []),
            *([] if config.vision is None else [f"sees with {self.vision!r}"]),
        ]

    @property
    def layers(self) -> Layers:
        """The decoder's layers by their index: read, written, replaced; an encoder's are `encoder.layers`."""
        return self.stack.layers

    def encode(
        self,
        inputs: Ids | None = None,
        *,
        embeddings: Float[Array, "B S d"] | None = None,
        valid: Bool[Array, "B S"] | None = None,
        routing: bool = False,
        hidden_states: Sequence[int] = (),
        experts_off: Mapping[int, Sequence[int]] | None = None,
        router_bias: Mapping[int, Float[Array, " E"]] | None = None,
        router_logits: Mapping[int, ChangeLogits] | None = None,
        key: Array | None = None,
    ) -> Encoded:
        """Runs the encoder.

        Args:
          inputs: token ids.
          embeddings: in place of tokens, as `Embed.look_up` returns them.
          valid: tokens that are not padding, which may be anywhere; None: all.
          routing, hidden_states, experts_off, router_bias, router_logits: as in the call, of the encoder's layers,
            which are counted from 0.
          key: random key of the pass, as in the call; None: deterministic.

        Raises:
          InputError: if the model has no encoder.
        """
        if not self.config.has_encoder:
            raise InputError(f"a {self.config.family!r} model has no encoder, and takes no inputs beside its tokens")
        if inputs is not None:
            inputs = as_ids("inputs", inputs, self.config.vocab_size)
        x = self.embed(inputs, embeddings=embeddings)
        out = self.encoder(
            x,
            valid=valid,
            routing=routing,
            hidden_states=hidden_states,
            experts_off=experts_off,
            router_bias=router_bias,
            router_logits=router_logits,
            key=keys.fold_in(key, keys.ENCODER),
        )
        return Encoded(out.x, valid, out.router, out.routing, out.hidden_states)

    def __call__(
        self,
        tokens: Ids | None = None,
        *,
        inputs: Ids | None = None,
        inputs_valid: Bool[Array, "B S"] | None = None,
        embeddings: Float[Array, "B T d"] | None = None,
        pixels: UInt8[Array, "B M H W 3"] | None = None,
        features: Float[Array, "B M n w"] | None = None,
        slots: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        prefix: Int[Array, " B"] | None = None,
        encoder_output: Float[Array, "B S e"] | None = None,
        encoder_valid: Bool[Array, "B S"] | None = None,
        caches: Caches | None = None,
        begins: bool = False,
        last_only: Int[Array, " B"] | None = None,
        routing: bool = False,
        hidden_states: Sequence[int] = (),
        experts_off: Mapping[int, Sequence[int]] | None = None,
        router_bias: Mapping[int, Float[Array, " E"]] | None = None,
        router_logits: Mapping[int, ChangeLogits] | None = None,
        key: Array | None = None,
    ) -> DecoderOutput:
        """Returns next-token logits.

        Args:
          tokens: token ids.
          inputs: token ids for the encoder, which is run first. In place of them `encoder_output` may be given.
          inputs_valid: inputs that are not padding; None: all.
          embeddings: in place of tokens, as `Embed.look_up` returns them.
          pixels: of M pictures for every row, as `images.processing` makes them; what no slot names does nothing.
          features: in place of pixels, what the tower makes of them, as `Vision.features` returns it.
          slots: which feature of its row's pictures takes the place of a token, counted from 1 over all; 0: none.
          positions: position of every token; details of this and of the following arguments are in `Stack`.
          segment_ids: documents packed in a row.
          valid: tokens that are not padding.
          prefix: lengths of prefixes.
          encoder_output: for cross-attention; from `encode`, or from an encoder elsewhere.
          encoder_valid: tokens of it that are not padding.
          caches: to continue a row.
          begins: with caches, whether rows begin with this call.
          last_only: index of the one position per row whose logits are wanted; None: all.
          routing: whether to return what the router of every MoE decided for every token. Not asked for, it costs
            nothing.
          hidden_states: layers whose inputs to return; the number of layers stands for the head's input.
          experts_off: by layer, experts that no token goes to; the others take their place, or where there are too few
            of them, -1.
          router_bias: by layer, what is added to the logits of its router.
          router_logits: by layer, a function of its router's logits, float32[B, T, E], that returns others.
          key: random key for everything random in training (such as the noise of `coder` routers); None: deterministic.

        Raises:
          InputError: if the arguments do not fit each other or the model.
        """
        check_key(key)
        if caches is None and tokens is not None:
            tokens = as_ids("tokens", tokens, self.config.vocab_size)
            warn_of_length(tokens.shape[1], self.config)
        try:
            out = self.activations(
                tokens,
                inputs=inputs,
                inputs_valid=inputs_valid,
                embeddings=embeddings,
                pixels=pixels,
                features=features,
                slots=slots,
                positions=positions,
                segment_ids=segment_ids,
                valid=valid,
                prefix=prefix,
                encoder_output=encoder_output,
                encoder_valid=encoder_valid,
                caches=caches,
                begins=begins,
                routing=routing,
                hidden_states=hidden_states,
                experts_off=experts_off,
                router_bias=router_bias,
                router_logits=router_logits,
                key=key,
            )
        except Exception:
            forget_captures(self)
            raise
        x = out.x
        if last_only is not None:
            last_only = as_array("last_only", last_only, "integers", x.shape[:1])
            check_range("last_only", last_only, x.shape[1], "indices of tokens")
            last_only = jnp.asarray(last_only)
            x = jnp.take_along_axis(x, last_only[:, None, None], axis=1)
        return DecoderOutput(self.logits(x), *out[1:])

    def see(
        self, pixels: UInt8[Array, "B M H W 3"] | None = None, *, features: Float[Array, "B M n w"] | None = None
    ) -> Float[Array, "B m d"]:
        """Returns the embeddings that every row's pictures become, one picture after another.

        Args:
          pixels, features: as in the call, one of them.

        Raises:
          InputError: if the model takes no pictures, or for arrays of another shape or dtype.
        """
        self.config.check_sees("pixels" if features is None else "features")
        if pixels is not None and features is None:
            return self.vision(pixels)
        if features is not None and pixels is None:
            return self.vision.project(features)
        raise InputError("a call sees pixels, or in their place features that a tower made of them: one of both")

    def activations(self, tokens: Ids | None = None, **given: Unpack[DecoderInputs]) -> StackOutput:
        """Returns the activations that the head takes; arguments as in the call."""
        inputs, inputs_valid = given.pop("inputs", None), given.pop("inputs_valid", None)
        embeddings = given.pop("embeddings", None)
        pixels, features = given.pop("pixels", None), given.pop("features", None)
        slots, has_pictures = given.pop("slots", None), pixels is not None or features is not None
        encoder_router: StackedStats = ()
        if inputs is not None:
            if given.get("encoder_output") is not None or given.get("encoder_valid") is not None:
                raise InputError("a call brings either inputs for the encoder or the encoder's output, not both")
            encoded = self.encode(inputs, valid=inputs_valid, key=given.get("key"))
            given["encoder_output"], given["encoder_valid"], encoder_router = encoded[:3]
        elif inputs_valid is not None:
            raise InputError("inputs_valid says what counts of inputs, which are not given")
        if has_pictures != (slots is not None):
            raise InputError(
                "pixels, or features, and slots go together: what the pictures are, and which tokens they replace"
            )
        if slots is not None:
            if embeddings is not None or tokens is None:
                raise InputError("pictures take the place of tokens; embeddings may have them in them already")
            seen = self.see(pixels, features=features)
            embeddings, tokens = splice(self.embed.look_up(tokens), seen, slots), None
        x = self.embed(tokens, given.get("positions"), embeddings=embeddings)
        of_stack: Any = given
        out = self.stack(x, **of_stack)
        return out._replace(router=(*encoder_router, *out.router))

    def auxiliary_loss(self, out: DecoderOutput | StackOutput) -> Float[Array, ""]:
        """Returns the sum of the routers' losses, with the config's coefficients, which training adds to its loss.

        It is float32, and 0 for a dense model. `out` is from a call of this model (methods.md 1).
        """
        routers, own = self.routers(), self.stack.routers()
        # In a call without inputs no encoder ran.
        ran = own if len(out.router) == len(own) else routers
        return sum_of_losses(self.config.balance_over, ran, out.router)

    def routers(self) -> list[Router]:
        """Returns all routers, an encoder's first, in the order in which they report; layers as the config counts."""
        first = self.config.num_encoder_layers
        before = self.encoder.routers() if self.config.has_encoder else []
        return before + [one._replace(layers=[first + layer for layer in one.layers]) for one in self.stack.routers()]

    def loss(
        self,
        batch: Batch,
        *,
        experts_off: Mapping[int, Sequence[int]] | None = None,
        router_bias: Mapping[int, Float[Array, " E"]] | None = None,
        router_logits: Mapping[int, ChangeLogits] | None = None,
        key: Array | None = None,
    ) -> Float[Array, ""]:
        """Returns the loss that training minimises, float32.

        It is the mean negative log-likelihood of the targets, by their weights, plus the `auxiliary_loss`. No logits of
        all tokens exist at once.

            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> decoder, ids = moe_jax.tiny_model(experts=4).decoder, jnp.ones((2, 6), jnp.int32)
            >>> batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
            >>> loss, grads = nnx.value_and_grad(lambda decoder: decoder.loss(batch))(decoder)
            >>> loss.shape
            ()

        Args:
          batch: at least `tokens` and `targets`; see `nn.inputs.Batch`.
          experts_off, router_bias, router_logits: changes of routers, as in the call.
          key: random key for everything random in training; None: deterministic.

        Raises:
          InputError: for a key of the batch that means nothing, or what the call refuses.
        """
        targets, weights = targets_and_weights(batch)
        check_range("targets", targets, self.config.vocab_size, "ids, with weight 0 where they are not scored")
        changes: Any = {"experts_off": experts_off, "router_bias": router_bias, "router_logits": router_logits}
        out = self.activations(**model_inputs(batch), **changes, key=key)
        # The divisor is part of the weights, so that the gradient is not rounded before it is divided.
        weights = weights / jnp.maximum(jnp.sum(weights), 1.0)
        return self.weighted_loss(out.x, targets, weights) + self.auxiliary_loss(out)

    def logits(self, x: Float[Array, "B T d"]) -> Float[Array, "B T V"]:
        """Returns next-token logits, float32, given the activations."""
        return self.lm_head(x, self._tied())

    def token_losses(self, x: Float[Array, "B T d"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """Returns the negative log-likelihood of every target, given the activations; see `Head.token_losses`."""
        return self.lm_head.token_losses(x, targets, self._tied())

    def weighted_loss(
        self, x: Float[Array, "B T d"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
    ) -> Float[Array, ""]:
        """Returns the weighted sum of `token_losses`, for training; see `Head.weighted_loss`."""
        return self.lm_head.weighted_loss(x, targets, weights, self._tied())

    def distilled_loss(
        self,
        x: Float[Array, "B T d"],
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        *,
        teacher: "Decoder",
        teacher_x: Float[Array, "B T e"],
        weight: float,
        temperature: float,
    ) -> DistilledLoss:
        """Returns the weighted sum of `token_losses`, mixed with the divergence from a teacher (methods.md 9).

        Args:
          x: the activations.
          targets: in [0, V).
          weights: of the tokens.
          teacher: another model with the same vocabulary; it gets no gradient.
          teacher_x: its activations for the same tokens.
          weight: of the divergence, in (0, 1].
          temperature: divides both models' logits in the divergence.
        """
        right, head = teacher.lm_head.teacher_inputs(teacher_x, teacher._tied())
        mixing = Distillation(weight, temperature, head)
        return self.lm_head.distilled_loss(x, targets, weights, self._tied(), mixing, right)

    def _tied(self) -> Table | None:
        return self.embed.table() if self.config.tie_embeddings else None


def unstacked(model: Decoder) -> Decoder:
    """Returns the same model in segments of one repeat; the model itself if it has no others.

    While both models live, they take the memory of the layers twice.
    """
    if not is_stacked(model):
        return model
    graphdef, state = nnx.split(model)
    copy = nnx.merge(graphdef, state)
    for stack in _stacks(copy):
        stack.segments = nnx.List([single for segment in stack.segments for single in _single_layers(segment)])
    return copy


def is_stacked(model: Decoder) -> bool:
    """Whether any layers of the model are stacked."""
    return any(segment.repeats > 1 for stack in _stacks(model) for segment in stack.segments)


def _stacks(model: Decoder) -> list[Stack]:
    return [model.stack, *([model.encoder] if model.config.has_encoder else [])]


def _single_layers(segment: BlockStack) -> list[BlockStack]:
    graphdef, state = nnx.split(segment.blocks)
    parts = _parts(state, segment.repeats)
    return [
        BlockStack(segment.start + repeat * len(segment.blocks), 1, nnx.merge(graphdef, part))
        for repeat, part in enumerate(parts)
    ]


def _parts(state: nnx.State, repeats: int) -> list[nnx.State]:
    """Slices stacked parameters into parts [1, ...], one per repeat, split over devices as the stacks are."""
    if all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        # One tree for each: NNX takes variables that are the same object for tied ones.
        one = lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype)  # noqa: E731
        return [jax.tree.map(one, state) for _ in range(repeats)]
    return _cut(state, repeats)


@jax.jit(static_argnums=1)
def _cut(state: nnx.State, repeats: int) -> list[nnx.State]:
    return [jax.tree.map(lambda leaf, at=at: leaf[at : at + 1], state) for at in range(repeats)]
