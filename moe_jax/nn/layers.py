"""The parts of a model beside attention and experts: linear maps, norms, FFNs, the embedding and the head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.core.errors import InputError
from moe_jax.experts.coded_table import CodedTable
from moe_jax.experts.devices import BATCH_AXES, axes_size, current_mesh, sequence_axis, splits_batch
from moe_jax.experts.forms import KernelForm
from moe_jax.experts.linear import Leaves, apply_ffn, ffn_linears
from moe_jax.experts.linear import Linear as Linear
from moe_jax.experts.shapes import FFNConfig, Matrix, normal_kernel
from moe_jax.functional.cross_entropy import (
    Distillation,
    DistilledLoss,
    TeacherArrays,
    distilled_cross_entropy,
    token_cross_entropies,
    weighted_cross_entropy,
)
from moe_jax.functional.dense import layer_norm, linear_float32, rms_norm, take_rows
from moe_jax.functional.few_rows.bfloat16_kernels import row_after_row
from moe_jax.functional.head_chunks import HeadOptions, LossAxes, finish_logits
from moe_jax.models.config import ModelConfig
from moe_jax.models.linear_codes import EMBED, HEAD, codes_of
from moe_jax.nn.inputs import Ids, as_array, as_ids, check_range

Table = Float[Array, "V d"] | CodedTable
"""Embeddings of all tokens."""


class Norm(nnx.Module):
    """Normalises the last axis.

    RMSNorm (`rms`), the same with factors `1 + scale` (`rms_plus_one`), LayerNorm (`layer`), the same without bias
    (`layer_unbiased`), or `none`.

    A shape (H, d) instead of a width d gives each of H heads scales of its own, in a LayerNorm without bias.
    """

    def __init__(self, kind: str, shape: int | tuple[int, ...], eps: float, *, dtype: jnp.dtype):
        self.kind = kind
        self.eps = eps
        if kind != "none":
            self.scale = nnx.Param((jnp.zeros if kind == "rms_plus_one" else jnp.ones)(shape, dtype))
        if kind == "layer":
            self.bias = nnx.Param(jnp.zeros(shape, dtype))

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        if self.kind == "none":
            return x
        if self.kind == "layer":
            return layer_norm(x, self.scale[...], self.bias[...], self.eps)
        if self.kind == "layer_unbiased":
            return layer_norm(x, self.scale[...], None, self.eps)
        return rms_norm(x, self.scale[...], self.eps, plus_one=self.kind == "rms_plus_one")


class FFN(nnx.Module):
    """A dense feed-forward network."""

    def __init__(self, config: FFNConfig, d_model: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.config = config
        for name, one in ffn_linears(config, d_model, bias=config.bias, rngs=rngs, dtype=dtype).items():
            setattr(self, name, one)

    def __call__(self, x: Float[Array, "... d"], key: Array | None = None) -> Float[Array, "... d"]:
        linears = {name: getattr(self, name) for name in self.config.matrices}
        return apply_ffn(linears, x, self.config.activation, key)


class Embed(Leaves):
    """Token embeddings [V, d], scaled, plus learned positions [P, d] where the model has them.

    Embeddings in codes are the kernel [d, V] of a head, with leaves `coded/codes` and so on.

    Attributes:
      compute_dtype: dtype of the activations.
    """

    embedding: nnx.Param
    positions: nnx.Param

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, compute_dtype: DTypeLike = jnp.float32):
        dtype = jnp.dtype(config.dtype)
        self.codes = codes_of(config.codes, EMBED)
        self.matrix = Matrix("", (config.d_model, config.vocab_size))
        if self.codes is None:
            leaves = {"embedding": normal_kernel(rngs, (config.vocab_size, config.d_model), dtype)}
        else:
            leaves = self.codes.fresh(rngs, self.matrix, (), dtype)
        if config.learned_positions:
            leaves["positions"] = normal_kernel(rngs, (config.max_positions, config.d_model), dtype)
        super().__init__(leaves, _is_trained)
        self.scale = config.embed_scale
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.has_positions = config.learned_positions

    def __call__(
        self,
        tokens: Ids | None = None,
        positions: Int[Array, "B T"] | None = None,
        *,
        embeddings: Float[Array, "B T d"] | None = None,
    ) -> Float[Array, "B T d"]:
        """Returns the activations for the first layer.

        Args:
          tokens: token ids.
          positions: position of every token in its document, for learned positions; None: 0, 1, ...
          embeddings: in place of tokens, as `look_up` returns them.

        Raises:
          InputError: unless exactly one of tokens and embeddings is given, for what `inputs.as_ids` refuses, or for
            other shapes, values or positions.
        """
        if (tokens is None) == (embeddings is None):
            raise InputError("a model takes either tokens or embeddings, and exactly one of them")
        if embeddings is not None:
            width, _ = self.matrix.shape
            embeddings = as_array("embeddings", embeddings, "floating-point numbers", (None, None, width))
            x = embeddings.astype(self.compute_dtype)
        else:
            assert tokens is not None
            x = self.look_up(tokens)
        if not self.has_positions:
            return x
        most = self.positions.shape[-2]
        if positions is not None:
            positions = as_array("positions", positions, "integers", x.shape[:2])
            check_range("positions", positions, most, f"positions of a model that has learned {most}")
        elif x.shape[1] > most:
            raise InputError(f"texts of {x.shape[1]} tokens, but the model has learned {most} positions")
        else:
            positions = default_positions(x.shape[:2])
        return x + take_rows(self.positions[...], jnp.asarray(positions)).astype(self.compute_dtype)

    def look_up(self, tokens: Ids) -> Float[Array, "B T d"]:
        """Returns scaled token embeddings, into which other embeddings, for example of images, may be spliced.

        Raises:
          InputError: for what `inputs.as_ids` refuses.
        """
        tokens, table = as_ids("tokens", tokens, self.matrix.shape[1]), self.table()
        if isinstance(table, CodedTable):
            x = table.look_up(jnp.asarray(tokens))
        else:
            x = take_rows(_whole_rows(table), jnp.asarray(tokens))
        x = x.astype(self.compute_dtype)
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, self.compute_dtype)

    def table(self) -> Table:
        """Returns what a tied head needs: the embeddings of all tokens, as they are stored."""
        if self.codes is None:
            return self.embedding[...]
        return CodedTable(self.codes, self.matrix, self.arrays())


def _is_trained(path: str, array: Array) -> bool:
    """Codes and zero points are not."""
    return jnp.issubdtype(array.dtype, jnp.floating)


def default_positions(shape: tuple[int, ...]) -> Int[Array, "B T"]:
    """Returns positions 0, 1, ... in every row."""
    return jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32)[None, :], shape)


def _whole_rows(embedding: Float[Array, "V d"]) -> Float[Array, "V d"]:
    """Gathers the embedding over `fsdp`, on a mesh, before tokens are looked up.

    If tokens were looked up in slices of `d`, activations would have to change from a split width to a split batch, for
    which the compiler would copy the whole batch to every device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return embedding
    return jax.lax.with_sharding_constraint(embedding, P("tensor", None))


class Head(Leaves):
    """Computes logits `cap(scale * (x W + b))`, float32; W is a kernel [d, V], or the transposed embedding.

    A kernel in codes has leaves `coded/codes` and so on.

    With `head_hidden`, x is first replaced by `tanh(x H + h)`: leaves `hidden/kernel` [d, d] and `hidden/bias` [d].
    """

    kernel: nnx.Param
    bias: nnx.Param
    hidden: Leaves

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        shape = (config.d_model, config.num_outputs)
        self.codes: KernelForm | None = codes_of(config.codes, HEAD)
        self.matrix = Matrix("", shape)
        if self.codes is not None:
            leaves = self.codes.fresh(rngs, self.matrix, (), dtype)
        else:
            leaves = {} if config.tie_embeddings else {"kernel": normal_kernel(rngs, shape, dtype)}
        if config.head_bias:
            leaves["bias"] = jnp.zeros(shape[1], dtype)
        if config.head_hidden:
            leaves["hidden/kernel"] = normal_kernel(rngs, (config.d_model, config.d_model), dtype)
            leaves["hidden/bias"] = jnp.zeros(config.d_model, dtype)
        super().__init__(leaves, _is_trained)
        self.is_hidden = config.head_hidden
        self.is_tied, self.has_bias = config.tie_embeddings, config.head_bias
        self.scale, self.soft_cap = config.logit_scale, config.logit_soft_cap

    def __call__(self, x: Float[Array, "B T d"], embedding: Table | None = None) -> Float[Array, "B T V"]:
        """Returns the logits; a tied head needs the embedding."""
        table, bias = self._arrays(embedding)
        if isinstance(table, CodedTable):
            logits = table.logits(self._hidden(x))
        else:
            x = self._hidden(x)
            logits = row_after_row(x, table, _tied_logits) if self.is_tied else linear_float32(x, table)
        return finish_logits(logits, bias, self.scale, self.soft_cap)

    def token_losses(
        self, x: Float[Array, "B T d"], targets: Int[Array, "B T"], embedding: Table | None = None
    ) -> Float[Array, "B T"]:
        """Returns the negative log-likelihood of every target, float32; only a chunk's logits exist at a time."""
        return token_cross_entropies(*self._operands(x, embedding), targets)

    def weighted_loss(
        self,
        x: Float[Array, "B T d"],
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        embedding: Table | None = None,
    ) -> Float[Array, ""]:
        """Returns the sum of `weights * token_losses`; its gradient costs less than that of the sum written out."""
        return weighted_cross_entropy(*self._operands(x, embedding), targets, weights)

    def distilled_loss(
        self,
        x: Float[Array, "B T d"],
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        embedding: Table | None,
        mixing: Distillation,
        teacher: TeacherArrays,
    ) -> DistilledLoss:
        """Returns `weighted_loss` mixed with the divergence from a teacher; see `teacher_inputs`."""
        options, *operands = self._operands(x, embedding)
        return distilled_cross_entropy(options, mixing, *operands, targets, weights, teacher)

    def teacher_inputs(
        self, x: Float[Array, "B T d"], embedding: Table | None = None
    ) -> tuple[TeacherArrays, HeadOptions]:
        """Returns the arrays and options of a teacher that a student's `distilled_loss` takes instead of logits."""
        options, x, kernel, bias = self._operands(x, embedding)
        return TeacherArrays(x, kernel, bias), options

    def _hidden(self, x: Float[Array, "B T d"]) -> Float[Array, "B T d"]:
        """Returns the input of the kernel: `x`, or the hidden state of a head that has one."""
        if not self.is_hidden:
            return x
        arrays = self.hidden.arrays()
        hidden = linear_float32(x, arrays["kernel"]) + arrays["bias"].astype(jnp.float32)[None, None, :]
        return jnp.tanh(hidden).astype(x.dtype)

    def _arrays(self, embedding: Table | None) -> tuple[Table, Array | None]:
        """Returns the kernel, which is [V, d] in a tied head unless it is in codes, and the bias."""
        assert (embedding is not None) == self.is_tied, "the embedding goes with a tied head, and only with it"
        bias = self.bias[...] if self.has_bias else None
        if embedding is None:
            coded = None if self.codes is None else CodedTable(self.codes, self.matrix, self.arrays())
            return self.kernel[...] if coded is None else coded, bias
        return embedding, bias

    def _operands(self, x: Array, embedding: Table | None) -> tuple[HeadOptions, Array, Array, Array | None]:
        """Returns the options of a loss, the input of the kernel, the kernel and the bias."""
        x, table, bias = self._hidden(x), *self._arrays(embedding)
        is_coded = isinstance(table, CodedTable)
        kernel, transposed = (table.kernel(x.dtype), False) if is_coded else (table, self.is_tied)
        axes = _axes(x.shape[:2], *self.matrix.shape)
        return HeadOptions(self.scale, self.soft_cap, transposed, axes), x, kernel, bias


def _tied_logits(x: Float[Array, "... d"], embedding: Float[Array, "V d"]) -> Float[Array, "... V"]:
    return linear_float32(x, embedding.T)


def _axes(batch: tuple[int, ...], width: int, vocabulary: int) -> LossAxes | None:
    """Returns how the mesh in use splits the operands of a loss: as its rule table says, if sizes are divisible."""
    mesh = current_mesh()
    if mesh is None:
        return None
    rows, length = batch
    split, sequence = splits_batch(mesh, rows), sequence_axis(mesh, length)
    # Kernels are split over `sequence` too, if it divides them and the devices along it have tokens of their own.
    splits_of_width = [("fsdp",)] if sequence is None else [("fsdp", sequence), ("fsdp",)]
    fitting = (axes for axes in splits_of_width if split and width % axes_size(mesh, *axes) == 0)
    return LossAxes(
        batch=BATCH_AXES if split else (),
        sequence=sequence,
        width=next(fitting, ()),
        vocabulary="tensor" if vocabulary % mesh.shape["tensor"] == 0 else None,
    )
