"""Cross-entropy of activations and the head of a model, computed in chunks of tokens (see `head_chunks`).

The weighted sum, which training uses, computes the gradient of a chunk while the chunk's logits exist: three products
in all. So does distillation, which has a teacher's logits beside those of the student. The losses of single tokens,
whose cotangents are not known at that time, compute the logits again in the backward pass.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.functional import head_chunks as chunks
from moe_jax.functional.head_chunks import HeadGradients, HeadOptions, HeadSpecs


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_cross_entropies(
    options: HeadOptions, x: Float[Array, "B T d"], kernel: Array, bias: Array | None, targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns the negative log-likelihood (natural logarithm) of every target, float32.

    Args:
      options: of the head.
      x: the input of the head; the kernel is cast to its dtype, and logits are float32.
      kernel, bias: of the head: [d, V] or [V, d], and [V].
      targets: in [0, V).
    """
    return _losses(options, (), x, kernel, bias, targets).losses


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

    In the dtype of `x` the gradient is rounded before the cotangent multiplies it: put factors into the weights.

    Args:
      options, x, kernel, bias, targets: see `token_cross_entropies`.
      weights: float32; 0 leaves a token out.
    """
    return jnp.sum(_losses(options, (), x, kernel, bias, targets).losses * weights)


def _token_forward(options: HeadOptions, *primals: Any) -> tuple[Array, tuple]:
    values = chunks.primal_values(*primals)
    wanted = tuple(jnp.zeros((), bool) if one else None for one in chunks.wanted_gradients(*primals[:3]))
    return _losses(options, (), *values).losses, (values, wanted)


def _token_backward(options: HeadOptions, kept: tuple, cotangent: Any) -> tuple:
    (x, kernel, bias, targets), wanted = kept
    wanted = tuple(one is not None for one in wanted)
    *_, gradients = _losses(options, wanted, x, kernel, bias, targets, cotangent)
    return (*chunks.cast_gradients(gradients, kernel, bias), None)


def _weighted_forward(options: HeadOptions, *primals: Any) -> tuple[Array, tuple]:
    x, kernel, bias, targets, weights = chunks.primal_values(*primals)
    *wanted, needs_all = chunks.wanted_gradients(*primals[:3], primals[4])
    losses, _, gradients = _losses(options, tuple(wanted), x, kernel, bias, targets, weights, needs_all=needs_all)
    return jnp.sum(losses * weights), (losses, chunks.cast_gradients(gradients, kernel, bias))


def _weighted_backward(options: HeadOptions, kept: tuple, cotangent: Any) -> tuple:
    losses, gradients = kept
    return chunks.scaled_gradients(losses, gradients, cotangent)


token_cross_entropies.defvjp(_token_forward, _token_backward, symbolic_zeros=True)
weighted_cross_entropy.defvjp(_weighted_forward, _weighted_backward, symbolic_zeros=True)


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
    return _mixed(distillation, _losses(options, (), x, kernel, bias, targets, None, distillation, teacher), weights)


def _distilled_forward(options: HeadOptions, distillation: Distillation, *primals: Any) -> tuple[DistilledLoss, tuple]:
    x, kernel, bias, targets, weights, teacher = chunks.primal_values(*primals)
    *wanted, needs_all = chunks.wanted_gradients(*primals[:3], primals[4])
    mixing = (distillation, teacher)
    found = _losses(options, tuple(wanted), x, kernel, bias, targets, weights, *mixing, needs_all=needs_all)
    kept = _mixture(distillation, found), chunks.cast_gradients(found.gradients, kernel, bias)
    return _mixed(distillation, found, weights), kept


def _distilled_backward(options: HeadOptions, distillation: Distillation, kept: tuple, cotangents: Any) -> tuple:
    losses, gradients = kept
    return (*chunks.scaled_gradients(losses, gradients, cotangents.total), None)


distilled_cross_entropy.defvjp(_distilled_forward, _distilled_backward, symbolic_zeros=True)


class _Losses(NamedTuple):
    """Cross-entropies of all tokens, their divergences from a teacher, if there is one, and the wanted gradients."""

    losses: Float[Array, "B T"]
    divergences: Float[Array, "B T"] | None
    gradients: HeadGradients


def _losses(
    options: HeadOptions,
    wanted: tuple[bool, ...],
    x: Array,
    kernel: Array,
    bias: Array | None,
    targets: Array,
    cotangents: Float[Array, "B T"] | None = None,
    distillation: Distillation | None = None,
    teacher: TeacherArrays | None = None,
    *,
    needs_all: bool = False,
) -> _Losses:
    """Returns the losses, and of x, kernel and bias those gradients of `sum(cotangents * losses)` that are wanted.

    With a teacher, the gradients are those of the `_mixture` of cross-entropies and divergences. Losses of tokens whose
    cotangent is 0 may become 0, unless `needs_all`.
    """
    share, temperature, head = distillation or (0.0, 1.0, options)
    if teacher is not None:
        # Two arrays of logits exist at a time.
        options = options._replace(logit_bytes=options.logit_bytes // 2)

    def local(
        x: Array, kernel: Array, bias: Array | None, targets: Array, cotangents: Any, teacher: TeacherArrays | None
    ) -> _Losses:
        kernel, rows = chunks.whole_kernel(options, kernel.astype(x.dtype)), x.reshape(-1, x.shape[-1])
        right_kernel: Any = None
        right_rows = None
        if teacher is not None:
            right_kernel = chunks.whole_kernel(head, teacher.kernel.astype(teacher.x.dtype))
            right_rows = teacher.x.reshape(-1, teacher.x.shape[-1])
        flat = (rows, right_rows, targets.reshape(-1), None if cotangents is None else cotangents.reshape(-1))

        def of_tokens(flat: Any) -> _Losses:
            rows, _, aims, _ = flat

            def add_chunk(sums: _Losses, start: Array | int, size: int) -> _Losses:
                chunk, right_chunk, aims, weights = jax.tree.map(
                    lambda a: lax.dynamic_slice_in_dim(a, start, size), flat
                )

                def finish(products: Array) -> Array:
                    return chunks.finish_logits(products, bias, options.scale, options.soft_cap)

                logits, pull = jax.vjp(finish, chunks.products_of_chunk(options, chunk, kernel))
                divergence = slope = None
                if teacher is not None:
                    right = chunks.products_of_chunk(head, right_chunk, right_kernel)
                    right = chunks.finish_logits(right, teacher.bias, head.scale, head.soft_cap)
                loss, log_sum, is_target = chunks.loss_of_logits(options, logits, aims)
                if teacher is not None:
                    divergence, slope = _divergence(options, logits, right, temperature)
                    slope = slope * jnp.float32(share)
                losses, divergences = jax.tree.map(
                    lambda total, one: lax.dynamic_update_slice_in_dim(total, one, start, 0),
                    (sums.losses, sums.divergences),
                    (loss, divergence),
                )
                if not any(wanted):
                    return _Losses(losses, divergences, sums.gradients)
                if share < 1:
                    of_targets = jnp.exp(logits - log_sum[:, None]) - is_target.astype(jnp.float32)
                    slope = of_targets if slope is None else slope + of_targets * jnp.float32(1 - share)
                (slope,) = pull(slope * weights[:, None])
                gradients = chunks.with_gradients_of_chunk(options, sums.gradients, start, chunk, kernel, slope)
                return _Losses(losses, divergences, gradients)

            nothing = jnp.zeros(aims.size, jnp.float32)
            none = chunks.no_gradients(wanted, rows, kernel, bias)
            sums = _Losses(nothing, None if teacher is None else nothing, none)
            return chunks.over_chunks(options, add_chunk, sums, kernel)

        sizes: list[int] = []
        if cotangents is not None and not needs_all:
            sizes = chunks.smaller_sizes(options, targets.size, rows.shape[-1], kernel.size // rows.shape[-1])
        found = of_tokens(flat) if not sizes else _of_scored(of_tokens, flat, sizes)
        losses, divergences = jax.tree.map(lambda one: one.reshape(targets.shape), (found.losses, found.divergences))
        return _Losses(losses, divergences, chunks.gradients_of_all_devices(options, found.gradients, x.shape))

    specs: Any = HeadSpecs.of(options)
    of_teacher: Any = HeadSpecs.of(head)
    teacher_specs = None if teacher is None else TeacherArrays(of_teacher.x, of_teacher.kernel, of_teacher.bias)
    in_specs = (specs.x, specs.kernel, specs.bias, specs.tokens, specs.tokens, teacher_specs)
    out_specs = _Losses(specs.tokens, specs.tokens, HeadGradients(specs.x, specs.kernel, specs.bias))
    return chunks.over_mesh(options, local, in_specs, out_specs)(x, kernel, bias, targets, cotangents, teacher)


def _of_scored(of_tokens: Callable[[Any], _Losses], flat: Any, sizes: Sequence[int]) -> _Losses:
    """Returns `of_tokens(flat)`, computed for the scored tokens alone where these fit into one of the sizes.

    In training on answers most tokens are not scored: their logits, and their part in the gradients, are left out.

    Args:
      of_tokens: returns losses and gradients of some tokens.
      flat: arrays with an entry for every token, of which the last one has the weights.
      sizes: numbers of tokens, least first.
    """
    is_scored = flat[-1] != 0
    scored_first = jnp.argsort(~is_scored, stable=True)

    def among(size: int, flat: Any) -> _Losses:
        chosen = scored_first[:size]

        def placed(some: Array) -> Array:
            whole = jnp.zeros((is_scored.size, *some.shape[1:]), some.dtype)
            return whole.at[chosen].set(some, unique_indices=True)

        found = of_tokens(jax.tree.map(lambda array: array[chosen], flat))
        losses, divergences, of_x = jax.tree.map(placed, (found.losses, found.divergences, found.gradients.x))
        return _Losses(losses, divergences, found.gradients._replace(x=of_x))

    total = jnp.sum(is_scored, dtype=jnp.int32)
    first_that_fits = jnp.sum(total > jnp.array(sizes, jnp.int32), dtype=jnp.int32)
    return lax.switch(first_that_fits, [*(partial(among, size) for size in sizes), of_tokens], flat)


def _divergence(
    options: HeadOptions, logits: Float[Array, "n v"], right: Float[Array, "n v"], temperature: float
) -> tuple[Float[Array, " n"], Float[Array, "n v"]]:
    """Returns the divergences from the teacher's logits, and their gradients with respect to the student's logits."""
    scale = jnp.float32(1 / temperature)
    logits, right = logits * scale, right * scale
    log_shares = logits - chunks.log_sum_of_exponentials(options, logits)[:, None]
    log_right = right - chunks.log_sum_of_exponentials(options, right)[:, None]
    shares = jnp.exp(log_right)
    axis = options.axes and options.axes.vocabulary
    divergence = chunks.sum_over_axes(jnp.sum(shares * (log_right - log_shares), axis=1), axis)
    return divergence * jnp.float32(temperature**2), (jnp.exp(log_shares) - shares) * jnp.float32(temperature)


def _mixture(distillation: Distillation, found: _Losses) -> Float[Array, "B T"]:
    """Returns every token's term of the total: divergence and cross-entropy, mixed."""
    share = distillation.weight
    assert found.divergences is not None
    mixed = found.divergences * jnp.float32(share)
    return mixed if share == 1 else mixed + found.losses * jnp.float32(1 - share)


def _mixed(distillation: Distillation, found: _Losses, weights: Array) -> DistilledLoss:
    assert found.divergences is not None
    total = jnp.sum(_mixture(distillation, found) * weights)
    return DistilledLoss(total, jnp.sum(found.losses * weights), jnp.sum(found.divergences * weights))
