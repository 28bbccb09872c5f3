"""The last part of a model: from activations to logits, or to the losses of targets."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.experts.forms.matrix import normal_kernel
from moe_jax.experts.layout.mesh import BATCH_AXES, axes_size, current_mesh, sequence_axis, splits_batch
from moe_jax.experts.variables import Leaves
from moe_jax.functional.cross_entropy import (
    Distillation,
    DistilledLoss,
    TeacherArrays,
    distilled_cross_entropy,
    token_cross_entropies,
    weighted_cross_entropy,
)
from moe_jax.functional.dense import linear_float32
from moe_jax.functional.head_chunks import HeadOptions, LossAxes, finish_logits
from moe_jax.models.config import ModelConfig


class Head(Leaves):
    """Computes logits `cap(scale * (x W + b))`, float32; W is a kernel [d, V], or the transposed embedding.

    With `head_hidden`, x is first replaced by `tanh(x H + h)`: leaves `hidden/kernel` [d, d] and `hidden/bias` [d].
    """

    kernel: nnx.Param
    bias: nnx.Param
    hidden: Leaves

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        shape = (config.d_model, config.num_outputs)
        leaves = {} if config.tie_embeddings else {"kernel": normal_kernel(rngs, shape, dtype)}
        if config.head_bias:
            leaves["bias"] = jnp.zeros(shape[1], dtype)
        if config.head_hidden:
            leaves["hidden/kernel"] = normal_kernel(rngs, (config.d_model, config.d_model), dtype)
            leaves["hidden/bias"] = jnp.zeros(config.d_model, dtype)
        super().__init__(leaves)
        self.is_hidden = config.head_hidden
        self.is_tied, self.has_bias = config.tie_embeddings, config.head_bias
        self.scale, self.soft_cap = config.logit_scale, config.logit_soft_cap

    def __call__(self, x: Float[Array, "B T d"], embedding: Float[Array, "V d"] | None = None) -> Float[Array, "B T V"]:
        """Returns the logits; a tied head needs the embedding."""
        kernel, bias = self._arrays(embedding)
        logits = linear_float32(self._hidden(x), kernel.T if self.is_tied else kernel)
        return finish_logits(logits, bias, self.scale, self.soft_cap)

    def token_losses(
        self, x: Float[Array, "B T d"], targets: Int[Array, "B T"], embedding: Float[Array, "V d"] | None = None
    ) -> Float[Array, "B T"]:
        """Returns the negative log-likelihood of every target, float32; only a chunk's logits exist at a time."""
        x, kernel, bias = self._hidden(x), *self._arrays(embedding)
        return token_cross_entropies(self._options(x, kernel), x, kernel, bias, targets)

    def weighted_loss(
        self,
        x: Float[Array, "B T d"],
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        embedding: Float[Array, "V d"] | None = None,
    ) -> Float[Array, ""]:
        """Returns the sum of `weights * token_losses`; its gradient costs less than that of the sum written out."""
        x, kernel, bias = self._hidden(x), *self._arrays(embedding)
        return weighted_cross_entropy(self._options(x, kernel), x, kernel, bias, targets, weights)

    def distilled_loss(
        self,
        x: Float[Array, "B T d"],
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        embedding: Float[Array, "V d"] | None,
        teacher: TeacherArrays,
        teacher_head: HeadOptions,
        *,
        weight: float,
        temperature: float,
    ) -> DistilledLoss:
        """Returns `weighted_loss` mixed with the divergence from a teacher; see `teacher_inputs`."""
        x, kernel, bias = self._hidden(x), *self._arrays(embedding)
        mixing = Distillation(weight, temperature, teacher_head)
        return distilled_cross_entropy(self._options(x, kernel), mixing, x, kernel, bias, targets, weights, teacher)

    def teacher_inputs(
        self, x: Float[Array, "B T d"], embedding: Float[Array, "V d"] | None = None
    ) -> tuple[TeacherArrays, HeadOptions]:
        """Returns the arrays and options of a teacher that a student's `distilled_loss` takes instead of logits."""
        x, kernel, bias = self._hidden(x), *self._arrays(embedding)
        return TeacherArrays(x, kernel, bias), self._options(x, kernel)

    def _hidden(self, x: Float[Array, "B T d"]) -> Float[Array, "B T d"]:
        """Returns the input of the kernel: `x`, or the hidden state of a head that has one."""
        if not self.is_hidden:
            return x
        arrays = self.hidden.arrays()
        hidden = linear_float32(x, arrays["kernel"]) + arrays["bias"].astype(jnp.float32)[None, None, :]
        return jnp.tanh(hidden).astype(x.dtype)

    def _arrays(self, embedding: Array | None) -> tuple[Array, Array | None]:
        """Returns the kernel, which is [V, d] in a tied head, and the bias."""
        assert (embedding is not None) == self.is_tied, "the embedding goes with a tied head, and only with it"
        return self.kernel[...] if embedding is None else embedding, self.bias[...] if self.has_bias else None

    def _options(self, x: Array, kernel: Array) -> HeadOptions:
        width, vocabulary = kernel.shape[:: -1 if self.is_tied else 1]
        return HeadOptions(self.scale, self.soft_cap, self.is_tied, _axes(x.shape[:2], width, vocabulary))


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
