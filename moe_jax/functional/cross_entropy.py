"""Cross-entropy of activations and the head of a model, computed in chunks of tokens (see `head_chunks`).

The weighted sum, which training uses, computes the gradient of a chunk while the chunk's logits exist: three products
in all. So does distillation, which has a teacher's logits beside those of the student. The losses of single tokens,
whose cotangents are not known at that time, compute the logits again in the backward pass.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.functional.head_chunks import (
    HeadGradients,
    HeadOptions,
    HeadSpecs,
    cast_gradients,
    finish_logits,
    gradients_of_all_devices,
    log_sum_of_exponentials,
    loss_of_logits,
    no_gradients,
    over_chunks,
    over_mesh,
    primal_values,
    products_of_chunk,
    scaled_gradients,
    sum_over_axes,
    vocabulary_size,
    wanted_gradients,
    whole_kernel,
    with_gradients_of_chunk,
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_cross_entropies(
    options: HeadOptions,
    x: Float[Array, "B T d"],
    kernel: Float[Array, "d V"] | Float[Array, "V d"],
    bias: Float[Array, " V"] | None,
    targets: Int[Array, "B T"],
) -> Float[Array, "B T"]:
    """Returns the negative log-likelihood (natural logarithm) of every target, float32.

    Args:
      options: of the head.
      x: the input of the head; the kernel is cast to its dtype, and logits are float32.
      kernel: of the head.
      bias: of the head.
      targets: in [0, V).
    """
    return _losses(options, x, kernel, bias, targets)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_cross_entropy(
    options: HeadOptions,
    x: Float[Array, "B T d"],
    kernel: Float[Array, "d V"] | Float[Array, "V d"],
    bias: Float[Array, " V"] | None,
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> Float[Array, ""]:
    """Returns the sum of `weights * token_cross_entropies`, float32; its gradient computes no product twice.

    In the dtype of `x` the gradient is rounded before it is multiplied by the cotangent: put factors into the weights.

    Args:
      options, x, kernel, bias, targets: see `token_cross_entropies`.
      weights: float32; 0 leaves a token out.
    """
    return jnp.sum(_losses(options, x, kernel, bias, targets) * weights)


def _token_forward(options: HeadOptions, *primals: Any) -> tuple[Array, tuple]:
    values = primal_values(*primals)
    wanted = tuple(jnp.zeros((), bool) if one else None for one in wanted_gradients(*primals[:3]))
    return _losses(options, *values), (values, wanted)


def _token_backward(options: HeadOptions, kept: tuple, cotangent: Any) -> tuple:
    (x, kernel, bias, targets), wanted = kept
    wanted = tuple(one is not None for one in wanted)
    _, gradients = _losses_and_gradients(options, wanted, x, kernel, bias, targets, cotangent)
    return (*cast_gradients(gradients, kernel, bias), None)


def _weighted_forward(options: HeadOptions, *primals: Any) -> tuple[Array, tuple]:
    x, kernel, bias, targets, weights = primal_values(*primals)
    wanted = wanted_gradients(*primals[:3])
    losses, gradients = _losses_and_gradients(options, wanted, x, kernel, bias, targets, weights)
    return jnp.sum(losses * weights), (losses, cast_gradients(gradients, kernel, bias))


def _weighted_backward(options: HeadOptions, kept: tuple, cotangent: Any) -> tuple:
    losses, gradients = kept
    return scaled_gradients(losses, gradients, cotangent)


token_cross_entropies.defvjp(_token_forward, _token_backward, symbolic_zeros=True)
weighted_cross_entropy.defvjp(_weighted_forward, _weighted_backward, symbolic_zeros=True)


def _losses(options: HeadOptions, x: Array, kernel: Array, bias: Array | None, targets: Array) -> Float[Array, "B T"]:
    def local(x: Array, kernel: Array, bias: Array | None, targets: Array) -> Array:
        kernel, rows = whole_kernel(options, kernel.astype(x.dtype)), x.reshape(-1, x.shape[-1])
        flat = targets.reshape(-1)

        def add_chunk(losses: Array, start: Array | int, size: int) -> Array:
            chunk, wanted = (lax.dynamic_slice_in_dim(a, start, size) for a in (rows, flat))
            logits = finish_logits(products_of_chunk(options, chunk, kernel), bias, options.scale, options.soft_cap)
            loss, _, _ = loss_of_logits(options, logits, wanted)
            return lax.dynamic_update_slice_in_dim(losses, loss, start, 0)

        losses = over_chunks(options, add_chunk, jnp.zeros(flat.shape, jnp.float32), vocabulary_size(options, kernel))
        return losses.reshape(targets.shape)

    specs = HeadSpecs.of(options)
    in_specs = (specs.x, specs.kernel, specs.bias, specs.tokens)
    return over_mesh(options, local, in_specs, specs.tokens)(x, kernel, bias, targets)


def _losses_and_gradients(
    options: HeadOptions,
    wanted: tuple[bool, ...],
    x: Array,
    kernel: Array,
    bias: Array | None,
    targets: Array,
    cotangents: Float[Array, "B T"],
) -> tuple[Float[Array, "B T"], HeadGradients]:
    """Returns the losses, and the wanted gradients of `sum(cotangents * losses)`: of x, kernel and bias."""

    def local(
        x: Array, kernel: Array, bias: Array | None, targets: Array, cotangents: Array
    ) -> tuple[Array, HeadGradients]:
        kernel, rows = whole_kernel(options, kernel.astype(x.dtype)), x.reshape(-1, x.shape[-1])
        flat = (rows, targets.reshape(-1), cotangents.reshape(-1))

        def add_chunk(sums: tuple[Array, HeadGradients], start: Array | int, size: int) -> tuple[Array, HeadGradients]:
            losses, gradients = sums
            chunk, aims, weights = (lax.dynamic_slice_in_dim(a, start, size) for a in flat)

            def finish(products: Array) -> Array:
                return finish_logits(products, bias, options.scale, options.soft_cap)

            logits, pull = jax.vjp(finish, products_of_chunk(options, chunk, kernel))
            loss, log_sum, is_target = loss_of_logits(options, logits, aims)
            shares = jnp.exp(logits - log_sum[:, None])
            (slope,) = pull((shares - is_target.astype(jnp.float32)) * weights[:, None])
            gradients = with_gradients_of_chunk(options, gradients, start, chunk, kernel, slope)
            return lax.dynamic_update_slice_in_dim(losses, loss, start, 0), gradients

        nothing = no_gradients(wanted, rows, kernel, bias)
        start = jnp.zeros(flat[1].shape, jnp.float32), nothing
        losses, gradients = over_chunks(options, add_chunk, start, vocabulary_size(options, kernel))
        gradients = gradients_of_all_devices(options, gradients, x.shape)
        return losses.reshape(targets.shape), gradients

    specs = HeadSpecs.of(options)
    in_specs = (specs.x, specs.kernel, specs.bias, specs.tokens, specs.tokens)
    out_specs = (specs.tokens, HeadGradients._make((specs.x, specs.kernel, specs.bias)))
    return over_mesh(options, local, in_specs, out_specs)(x, kernel, bias, targets, cotangents)


class Distillation(NamedTuple):
    """How a loss is mixed from the cross-entropy and the divergence from a teacher.

    Attributes:
      weight: of the divergence from the teacher, in (0, 1]; the cross-entropy has the rest.
      temperature: divides the logits of both in the divergence, which is multiplied by its square.
      head: of the teacher; it must split tokens and vocabulary as the student's head does.
    """

    weight: float
    temperature: float
    head: HeadOptions


class TeacherArrays(NamedTuple):
    """The arrays from which a teacher's logits are computed; none of them gets a gradient.

    Attributes:
      x: [B, T, e]: the input of the teacher's head; its width e may differ from the student's.
      kernel: of its head, laid out as its `HeadOptions` say.
      bias: of its head.
    """

    x: Array
    kernel: Array
    bias: Array | None


class DistilledLoss(NamedTuple):
    """Weighted sums over the tokens, float32.

    Attributes:
      total: `weight * divergence + (1 - weight) * cross_entropy`; the only one of the three with a gradient.
      cross_entropy: with the targets.
      divergence: the squared temperature times the Kullback-Leibler divergence of the student from the teacher.
    """

    total: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    divergence: Float[Array, ""]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def distilled_cross_entropy(
    options: HeadOptions,
    distillation: Distillation,
    x: Float[Array, "B T d"],
    kernel: Float[Array, "d V"] | Float[Array, "V d"],
    bias: Float[Array, " V"] | None,
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    teacher: TeacherArrays,
) -> DistilledLoss:
    """Returns a mixture of `weighted_cross_entropy` and the divergence from a teacher (methods.md 9).

    Its gradient computes no product twice.

    Args:
      options: of the student's head.
      distillation: how the two are mixed.
      x, kernel, bias, targets: of the student; see `token_cross_entropies`.
      weights: float32; 0 leaves a token out.
      teacher: the teacher's arrays for the same tokens.
    """
    losses, _ = _distilled(options, distillation, (False,) * 3, x, kernel, bias, targets, weights, teacher)
    return _mixed(distillation, losses, weights)


def _distilled_forward(options: HeadOptions, distillation: Distillation, *primals: Any) -> tuple[DistilledLoss, tuple]:
    x, kernel, bias, targets, weights, teacher = primal_values(*primals)
    wanted = wanted_gradients(*primals[:3])
    losses, gradients = _distilled(options, distillation, wanted, x, kernel, bias, targets, weights, teacher)
    kept = _mixture(distillation, losses), cast_gradients(gradients, kernel, bias)
    return _mixed(distillation, losses, weights), kept


def _distilled_backward(options: HeadOptions, distillation: Distillation, kept: tuple, cotangents: Any) -> tuple:
    losses, gradients = kept
    return (*scaled_gradients(losses, gradients, cotangents.total), None)


distilled_cross_entropy.defvjp(_distilled_forward, _distilled_backward, symbolic_zeros=True)


def _distilled(
    options: HeadOptions,
    distillation: Distillation,
    wanted: tuple[bool, ...],
    x: Array,
    kernel: Array,
    bias: Array | None,
    targets: Array,
    cotangents: Float[Array, "B T"],
    teacher: TeacherArrays,
) -> tuple[tuple[Float[Array, "B T"], Float[Array, "B T"]], HeadGradients]:
    """Returns cross-entropies and divergences of all tokens, and the wanted gradients of x, kernel and bias.

    The gradients are those of `sum(cotangents * _mixture(distillation, ...))`.
    """
    share, temperature, head = distillation
    # Two arrays of logits exist at a time.
    options = options._replace(logit_bytes=options.logit_bytes // 2)

    def local(
        x: Array, kernel: Array, bias: Array | None, targets: Array, cotangents: Array, teacher: TeacherArrays
    ) -> tuple[tuple[Array, Array], HeadGradients]:
        kernel, rows = whole_kernel(options, kernel.astype(x.dtype)), x.reshape(-1, x.shape[-1])
        right_kernel = whole_kernel(head, teacher.kernel.astype(teacher.x.dtype))
        right_rows = teacher.x.reshape(-1, teacher.x.shape[-1])
        flat = (rows, right_rows, targets.reshape(-1), cotangents.reshape(-1))

        def add_chunk(sums: tuple, start: Array | int, size: int) -> tuple:
            losses, divergences, gradients = sums
            chunk, right_chunk, aims, weights = (lax.dynamic_slice_in_dim(a, start, size) for a in flat)

            def finish(products: Array) -> Array:
                return finish_logits(products, bias, options.scale, options.soft_cap)

            logits, pull = jax.vjp(finish, products_of_chunk(options, chunk, kernel))
            right_products = products_of_chunk(head, right_chunk, right_kernel)
            right = finish_logits(right_products, teacher.bias, head.scale, head.soft_cap)
            loss, log_sum, is_target = loss_of_logits(options, logits, aims)
            divergence, slope = _divergence(options, logits, right, temperature)
            slope = slope * jnp.float32(share)
            if share < 1:
                of_targets = jnp.exp(logits - log_sum[:, None]) - is_target.astype(jnp.float32)
                slope = slope + of_targets * jnp.float32(1 - share)
            (slope,) = pull(slope * weights[:, None])
            gradients = with_gradients_of_chunk(options, gradients, start, chunk, kernel, slope)
            losses = lax.dynamic_update_slice_in_dim(losses, loss, start, 0)
            return losses, lax.dynamic_update_slice_in_dim(divergences, divergence, start, 0), gradients

        nothing = jnp.zeros(flat[2].shape, jnp.float32)
        start = nothing, nothing, no_gradients(wanted, rows, kernel, bias)
        losses, divergences, gradients = over_chunks(options, add_chunk, start, vocabulary_size(options, kernel))
        both = losses.reshape(targets.shape), divergences.reshape(targets.shape)
        return both, gradients_of_all_devices(options, gradients, x.shape)

    specs, of_teacher = HeadSpecs.of(options), HeadSpecs.of(head)
    arrays = TeacherArrays._make((of_teacher.x, of_teacher.kernel, of_teacher.bias))
    in_specs = (specs.x, specs.kernel, specs.bias, specs.tokens, specs.tokens, arrays)
    out_specs = ((specs.tokens, specs.tokens), HeadGradients._make((specs.x, specs.kernel, specs.bias)))
    return over_mesh(options, local, in_specs, out_specs)(x, kernel, bias, targets, cotangents, teacher)


def _divergence(
    options: HeadOptions, logits: Float[Array, "n v"], right: Float[Array, "n v"], temperature: float
) -> tuple[Float[Array, " n"], Float[Array, "n v"]]:
    """Returns the divergences from the teacher's logits, and their gradients with respect to the student's logits."""
    scale = jnp.float32(1 / temperature)
    logits, right = logits * scale, right * scale
    log_shares = logits - log_sum_of_exponentials(options, logits)[:, None]
    log_right = right - log_sum_of_exponentials(options, right)[:, None]
    shares = jnp.exp(log_right)
    axis = options.axes and options.axes.vocabulary
    divergence = sum_over_axes(jnp.sum(shares * (log_right - log_shares), axis=1), axis)
    return divergence * jnp.float32(temperature**2), (jnp.exp(log_shares) - shares) * jnp.float32(temperature)


def _mixture(distillation: Distillation, losses: tuple[Array, Array]) -> Float[Array, "B T"]:
    """Returns every token's term of the total: divergence and cross-entropy, mixed."""
    share = distillation.weight
    mixed = losses[1] * jnp.float32(share)
    return mixed if share == 1 else mixed + losses[0] * jnp.float32(1 - share)


def _mixed(distillation: Distillation, losses: tuple[Array, Array], weights: Array) -> DistilledLoss:
    total = jnp.sum(_mixture(distillation, losses) * weights)
    return DistilledLoss(total, *(jnp.sum(one * weights) for one in losses))
