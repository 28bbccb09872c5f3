"""Cross-entropy of activations and the head of a model, computed in chunks of tokens (see `head_chunks`).

The weighted sum, which training uses, computes the gradient of a chunk while the chunk's logits exist: three products
in all. The losses of single tokens, whose cotangents are not known at that time, compute the logits again in the
backward pass.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.functional.heads.head_chunks import (
    HeadGradients,
    HeadOptions,
    HeadSpecs,
    cast_gradients,
    finish_logits,
    gradients_of_all_devices,
    loss_of_logits,
    no_gradients,
    over_chunks,
    over_mesh,
    primal_values,
    products_of_chunk,
    scaled_gradients,
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
