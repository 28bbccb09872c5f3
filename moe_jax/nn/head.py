"""The last part of a model: from activations to logits, or to the losses of targets."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.experts.forms.fresh import normal_kernel
from moe_jax.experts.layout.mesh import BATCH_AXES, axes_size, current_mesh, sequence_axis, splits_batch
from moe_jax.experts.variables import Leaves
from moe_jax.functional.heads.cross_entropy import token_cross_entropies, weighted_cross_entropy
from moe_jax.functional.heads.distilled_cross_entropy import (
    Distillation,
    DistilledLoss,
    TeacherArrays,
    distilled_cross_entropy,
)
from moe_jax.functional.heads.head_chunks import HeadOptions, LossAxes, finish_logits
from moe_jax.functional.products.linear import linear_float32
from moe_jax.models.config import ModelConfig


class Head(Leaves):
    """`cap(scale * (x W + b))`, float32; W is a kernel [d, V] of its own, or the transposed embedding.

    With `head_hidden`, x is `tanh(x H + h)` before that: leaves `hidden/kernel` [d, d] and `hidden/bias` [d].
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
        """Logits; a tied head needs the embedding."""
        kernel, bias = self._arrays(embedding)
        logits = linear_float32(self._hidden(x), kernel.T if self.is_tied else kernel)
        return finish_logits(logits, bias, self.scale, self.soft_cap)

    def token_losses(
        self, x: Float[Array, "B T d"], targets: Int[Array, "B T"], embedding: Float[Array, "V d"] | None = None
    ) -> Float[Array, "B T"]:
        """Negative log-likelihood of every target, float32; logits are those of a chunk of tokens at a time."""
        x, kernel, bias = self._hidden(x), *self._arrays(embedding)
        return token_cross_entropies(self._options(x, kernel), x, kernel, bias, targets)

    def weighted_loss(
        self,
        x: Float[Array, "B T d"],
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        embedding: Float[Array, "V d"] | None = None,
    ) -> Float[Array, ""]:
        """The sum of `weights * token_losses`, whose gradient costs less than that of a sum of theirs."""
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
        """`weighted_loss` mixed with the divergence from a teacher, of which `to_distill` gives the rest."""
        x, kernel, bias = self._hidden(x), *self._arrays(embedding)
        mixing = Distillation(weight, temperature, teacher_head)
        return distilled_cross_entropy(self._options(x, kernel), mixing, x, kernel, bias, targets, weights, teacher)

    def to_distill(
        self, x: Float[Array, "B T d"], embedding: Float[Array, "V d"] | None = None
    ) -> tuple[TeacherArrays, HeadOptions]:
        """What a student's `distilled_loss` takes of its teacher, in place of the logits of all tokens."""
        x, kernel, bias = self._hidden(x), *self._arrays(embedding)
        return TeacherArrays(x, kernel, bias), self._options(x, kernel)

    def _hidden(self, x: Float[Array, "B T d"]) -> Float[Array, "B T d"]:
        """What meets the kernel."""
        if not self.is_hidden:
            return x
        arrays = self.hidden.arrays()
        hidden = linear_float32(x, arrays["kernel"]) + arrays["bias"].astype(jnp.float32)[None, None, :]
        return jnp.tanh(hidden).astype(x.dtype)

    def _arrays(self, embedding: Array | None) -> tuple[Array, Array | None]:
        """The kernel, which is [V, d] in a tied head, and the bias."""
        assert (embedding is not None) == self.is_tied, "the embedding goes with a tied head, and only with it"
        return self.kernel[...] if embedding is None else embedding, self.bias[...] if self.has_bias else None

    def _options(self, x: Array, kernel: Array) -> HeadOptions:
        width, vocabulary = kernel.shape[:: -1 if self.is_tied else 1]
        return HeadOptions(self.scale, self.soft_cap, self.is_tied, _axes(x.shape[:2], width, vocabulary))


def _axes(batch: tuple[int, ...], width: int, vocabulary: int) -> LossAxes | None:
    """How the mesh in use splits the operands of a loss: as its rule table does, where that divides them."""
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
