"""Cross-entropy of activations and the head of a model, chunk by chunk of the tokens.

Logits of all tokens at once, [N, V] in float32, are the largest array of a training step (20 GB for 32,768 tokens and
a vocabulary of 151,936). Here those of a chunk are made, used and forgotten. The weighted sum, which training takes,
makes the gradient of a chunk while its logits are there: three products in all, none of them twice. The losses of
single tokens, whose cotangents are not known then, make the logits again in the backward pass. Distillation goes the
same way, with the logits of a teacher's chunk beside those of the student's.

Over a mesh the tokens are split over the batch axes and the vocabulary over another (`shard_map`): the compiler would
add up the gradient of the kernel over the devices after every chunk, and not once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

LOGIT_BYTES = 768 << 20
"""The most that the float32 logits of a chunk take on a device, where a single token's do not take more."""


class LossAxes(NamedTuple):
    """Axes of the mesh in use that split the operands; whatever none of them splits, every device has as a whole.

    Attributes:
      batch: of the rows.
      sequence: of the tokens of a row; None: none does.
      width: some of these, which split the width of the kernel too (fully sharded parameters).
      vocabulary: of the columns of the kernel and the bias; None: none does.
    """

    batch: tuple[str, ...]
    sequence: str | None = None
    width: tuple[str, ...] = ()
    vocabulary: str | None = None

    @property
    def tokens(self) -> tuple[str, ...]:
        """Those that split the tokens of a batch."""
        return self.batch if self.sequence is None else (*self.batch, self.sequence)


class HeadOptions(NamedTuple):
    """What a head is, apart from its arrays.

    Attributes:
      scale: of the logits.
      soft_cap: logits become `c tanh(logits / c)` after that; None: they stay.
      transposed: the kernel is [V, d], as an embedding is, and not [d, V].
      axes: of the mesh; None: there is one device.
      logit_bytes: see `LOGIT_BYTES`. The result does not depend on it.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    transposed: bool = False
    axes: LossAxes | None = None
    logit_bytes: int = LOGIT_BYTES


class Distillation(NamedTuple):
    """How a loss is mixed of the cross-entropy and of what a teacher's logits say.

    Attributes:
      weight: of the divergence from the teacher, in (0, 1]; the cross-entropy has the rest.
      temperature: that the logits of both are divided by in the divergence, which is multiplied by its square.
      head: of the teacher; it splits tokens and vocabulary as the student's does.
    """

    weight: float
    temperature: float
    head: HeadOptions


class TeacherArrays(NamedTuple):
    """What a teacher's logits are made of; none of it gets a gradient.

    Attributes:
      x: [B, T, e]: what its head is given, whatever the width e.
      kernel: of its head, as its `HeadOptions` say.
      bias: of its head.
    """

    x: Array
    kernel: Array
    bias: Array | None


class DistilledLoss(NamedTuple):
    """Weighted sums over the tokens, float32.

    Attributes:
      total: `weight * divergence + (1 - weight) * cross_entropy`; alone of the three it has a gradient.
      cross_entropy: with the targets.
      divergence: the squared temperature times the Kullback-Leibler divergence of the student from the teacher.
    """

    total: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    divergence: Float[Array, ""]


def finish_logits(
    products: Float[Array, "... V"], bias: Float[Array, " V"] | None, scale: float, soft_cap: float | None
) -> Float[Array, "... V"]:
    """`cap(scale * (products + b))`, float32."""
    logits = products
    if bias is not None:
        logits = logits + jnp.expand_dims(bias.astype(jnp.float32), tuple(range(logits.ndim - 1)))
    if scale != 1.0:
        logits = logits * jnp.float32(scale)
    return logits if soft_cap is None else jnp.tanh(logits / jnp.float32(soft_cap)) * jnp.float32(soft_cap)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_cross_entropies(
    options: HeadOptions,
    x: Float[Array, "B T d"],
    kernel: Float[Array, "d V"] | Float[Array, "V d"],
    bias: Float[Array, " V"] | None,
    targets: Int[Array, "B T"],
) -> Float[Array, "B T"]:
    """Negative log-likelihood (natural logarithm) of every target, float32.

    Args:
      options: of the head.
      x: what the head is given; the kernel is cast to its dtype, and logits are float32.
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
    """The sum of `weights * token_cross_entropies`, float32, whose gradient costs no product twice.

    In the dtype of `x` its gradient is rounded before it is multiplied by the cotangent: factors belong in the weights.

    Args:
      options: of the head.
      x: as in `token_cross_entropies`.
      kernel: as there.
      bias: as there.
      targets: as there.
      weights: float32; 0 leaves a token out.
    """
    return jnp.sum(_losses(options, x, kernel, bias, targets) * weights)


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
    """`weighted_cross_entropy` and the divergence from a teacher (methods.md 9), whose gradient costs no product twice.

    Args:
      options: of the student's head.
      distillation: how the two are mixed.
      x: as in `token_cross_entropies`.
      kernel: as there.
      bias: as there.
      targets: as there.
      weights: float32; 0 leaves a token out.
      teacher: what it gives for the same tokens.
    """
    losses, _ = _distilled(options, distillation, (False,) * 3, x, kernel, bias, targets, weights, teacher)
    return _mixed(distillation, losses, weights)


class _Gradients(NamedTuple):
    """None for what is not wanted; the kernel's and the bias's are float32."""

    x: Array | None
    kernel: Array | None
    bias: Array | None


def _values(*primals: Any) -> tuple:
    return jax.tree.map(lambda primal: primal.value, primals, is_leaf=_is_primal)


def _wanted(*primals: Any) -> tuple[bool, ...]:
    return tuple(primal is not None and primal.perturbed for primal in primals)


def _is_primal(value: Any) -> bool:
    return isinstance(value, jax.custom_derivatives.CustomVJPPrimal)


def _cotangents(gradients: _Gradients, kernel_dtype: jnp.dtype, bias_dtype: jnp.dtype | None) -> tuple:
    x, kernel, bias = gradients
    return x, None if kernel is None else kernel.astype(kernel_dtype), None if bias is None else bias.astype(bias_dtype)


def _token_forward(options: HeadOptions, *primals: Any) -> tuple[Array, tuple]:
    values = _values(*primals)
    wanted = tuple(jnp.zeros((), bool) if one else None for one in _wanted(*primals[:3]))
    return _losses(options, *values), (values, wanted)


def _token_backward(options: HeadOptions, kept: tuple, cotangent: Any) -> tuple:
    (x, kernel, bias, targets), wanted = kept
    wanted = tuple(one is not None for one in wanted)
    _, gradients = _losses_and_gradients(options, wanted, x, kernel, bias, targets, cotangent)
    return (*_cotangents(gradients, kernel.dtype, None if bias is None else bias.dtype), None)


def _weighted_forward(options: HeadOptions, *primals: Any) -> tuple[Array, tuple]:
    x, kernel, bias, targets, weights = _values(*primals)
    losses, gradients = _losses_and_gradients(options, _wanted(*primals[:3]), x, kernel, bias, targets, weights)
    gradients = _Gradients(*_cotangents(gradients, kernel.dtype, None if bias is None else bias.dtype))
    return jnp.sum(losses * weights), (losses, gradients)


def _weighted_backward(options: HeadOptions, kept: tuple, cotangent: Any) -> tuple:
    losses, gradients = kept

    def scaled(gradient: Array) -> Array:
        return (gradient.astype(jnp.float32) * cotangent).astype(gradient.dtype)

    return (*jax.tree.map(scaled, tuple(gradients)), None, losses * cotangent)


def _distilled_forward(
    options: HeadOptions, distillation: Distillation, *primals: Any
) -> tuple[DistilledLoss, tuple]:
    x, kernel, bias, targets, weights, teacher = _values(*primals)
    wanted = _wanted(*primals[:3])
    losses, gradients = _distilled(options, distillation, wanted, x, kernel, bias, targets, weights, teacher)
    gradients = _Gradients(*_cotangents(gradients, kernel.dtype, None if bias is None else bias.dtype))
    return _mixed(distillation, losses, weights), (_mixture(distillation, losses), gradients)


def _distilled_backward(options: HeadOptions, distillation: Distillation, kept: tuple, cotangents: Any) -> tuple:
    return (*_weighted_backward(options, kept, cotangents.total), None)


token_cross_entropies.defvjp(_token_forward, _token_backward, symbolic_zeros=True)
weighted_cross_entropy.defvjp(_weighted_forward, _weighted_backward, symbolic_zeros=True)
distilled_cross_entropy.defvjp(_distilled_forward, _distilled_backward, symbolic_zeros=True)


def _losses(options: HeadOptions, x: Array, kernel: Array, bias: Array | None, targets: Array) -> Float[Array, "B T"]:
    def local(x: Array, kernel: Array, bias: Array | None, targets: Array) -> Array:
        kernel, rows = _whole_kernel(options, kernel.astype(x.dtype)), x.reshape(-1, x.shape[-1])
        flat = targets.reshape(-1)

        def add_chunk(losses: Array, start: Array | int, size: int) -> Array:
            chunk, wanted = (lax.dynamic_slice_in_dim(a, start, size) for a in (rows, flat))
            logits = finish_logits(_product(options, chunk, kernel), bias, options.scale, options.soft_cap)
            loss, _, _ = _loss_of_logits(options, logits, wanted)
            return lax.dynamic_update_slice_in_dim(losses, loss, start, 0)

        losses = _over_chunks(options, add_chunk, jnp.zeros(flat.shape, jnp.float32), _vocabulary(options, kernel))
        return losses.reshape(targets.shape)

    specs = _Specs.of(options)
    in_specs = (specs.x, specs.kernel, specs.bias, specs.tokens)
    return _over_mesh(options, local, in_specs, specs.tokens)(x, kernel, bias, targets)


def _losses_and_gradients(
    options: HeadOptions,
    wanted: tuple[bool, ...],
    x: Array,
    kernel: Array,
    bias: Array | None,
    targets: Array,
    cotangents: Float[Array, "B T"],
) -> tuple[Float[Array, "B T"], _Gradients]:
    """The losses, and the gradients of `sum(cotangents * losses)` that are wanted: of x, kernel and bias."""

    def local(
        x: Array, kernel: Array, bias: Array | None, targets: Array, cotangents: Array
    ) -> tuple[Array, _Gradients]:
        kernel, rows = _whole_kernel(options, kernel.astype(x.dtype)), x.reshape(-1, x.shape[-1])
        flat = (rows, targets.reshape(-1), cotangents.reshape(-1))

        def add_chunk(sums: tuple[Array, _Gradients], start: Array | int, size: int) -> tuple[Array, _Gradients]:
            losses, gradients = sums
            chunk, aims, weights = (lax.dynamic_slice_in_dim(a, start, size) for a in flat)

            def finish(products: Array) -> Array:
                return finish_logits(products, bias, options.scale, options.soft_cap)

            logits, pull = jax.vjp(finish, _product(options, chunk, kernel))
            loss, log_sum, is_target = _loss_of_logits(options, logits, aims)
            shares = jnp.exp(logits - log_sum[:, None])
            (slope,) = pull((shares - is_target.astype(jnp.float32)) * weights[:, None])
            gradients = _with_chunk(options, gradients, start, chunk, kernel, slope)
            return lax.dynamic_update_slice_in_dim(losses, loss, start, 0), gradients

        nothing = _no_gradients(wanted, rows, kernel, bias)
        start = jnp.zeros(flat[1].shape, jnp.float32), nothing
        losses, gradients = _over_chunks(options, add_chunk, start, _vocabulary(options, kernel))
        gradients = _of_all_devices(options, gradients, x.shape)
        return losses.reshape(targets.shape), gradients

    specs = _Specs.of(options)
    in_specs = (specs.x, specs.kernel, specs.bias, specs.tokens, specs.tokens)
    out_specs = (specs.tokens, _Gradients._make((specs.x, specs.kernel, specs.bias)))
    return _over_mesh(options, local, in_specs, out_specs)(x, kernel, bias, targets, cotangents)


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
) -> tuple[tuple[Float[Array, "B T"], Float[Array, "B T"]], _Gradients]:
    """Cross-entropies and divergences of all tokens, and the gradients that are wanted of
    `sum(cotangents * _mixture(distillation, ...))`."""
    share, temperature, head = distillation
    # Two arrays of logits are there at a time.
    options = options._replace(logit_bytes=options.logit_bytes // 2)

    def local(
        x: Array, kernel: Array, bias: Array | None, targets: Array, cotangents: Array, teacher: TeacherArrays
    ) -> tuple[tuple[Array, Array], _Gradients]:
        kernel, rows = _whole_kernel(options, kernel.astype(x.dtype)), x.reshape(-1, x.shape[-1])
        right_kernel = _whole_kernel(head, teacher.kernel.astype(teacher.x.dtype))
        right_rows = teacher.x.reshape(-1, teacher.x.shape[-1])
        flat = (rows, right_rows, targets.reshape(-1), cotangents.reshape(-1))

        def add_chunk(sums: tuple, start: Array | int, size: int) -> tuple:
            losses, divergences, gradients = sums
            chunk, right_chunk, aims, weights = (lax.dynamic_slice_in_dim(a, start, size) for a in flat)

            def finish(products: Array) -> Array:
                return finish_logits(products, bias, options.scale, options.soft_cap)

            logits, pull = jax.vjp(finish, _product(options, chunk, kernel))
            right_products = _product(head, right_chunk, right_kernel)
            right = finish_logits(right_products, teacher.bias, head.scale, head.soft_cap)
            loss, log_sum, is_target = _loss_of_logits(options, logits, aims)
            divergence, slope = _divergence(options, logits, right, temperature)
            slope = slope * jnp.float32(share)
            if share < 1:
                of_targets = jnp.exp(logits - log_sum[:, None]) - is_target.astype(jnp.float32)
                slope = slope + of_targets * jnp.float32(1 - share)
            (slope,) = pull(slope * weights[:, None])
            gradients = _with_chunk(options, gradients, start, chunk, kernel, slope)
            losses = lax.dynamic_update_slice_in_dim(losses, loss, start, 0)
            return losses, lax.dynamic_update_slice_in_dim(divergences, divergence, start, 0), gradients

        nothing = jnp.zeros(flat[2].shape, jnp.float32)
        start = nothing, nothing, _no_gradients(wanted, rows, kernel, bias)
        losses, divergences, gradients = _over_chunks(options, add_chunk, start, _vocabulary(options, kernel))
        both = losses.reshape(targets.shape), divergences.reshape(targets.shape)
        return both, _of_all_devices(options, gradients, x.shape)

    specs, of_teacher = _Specs.of(options), _Specs.of(head)
    arrays = TeacherArrays._make((of_teacher.x, of_teacher.kernel, of_teacher.bias))
    in_specs = (specs.x, specs.kernel, specs.bias, specs.tokens, specs.tokens, arrays)
    out_specs = ((specs.tokens, specs.tokens), _Gradients._make((specs.x, specs.kernel, specs.bias)))
    return _over_mesh(options, local, in_specs, out_specs)(x, kernel, bias, targets, cotangents, teacher)


def _divergence(
    options: HeadOptions, logits: Float[Array, "n v"], right: Float[Array, "n v"], temperature: float
) -> tuple[Float[Array, " n"], Float[Array, "n v"]]:
    """The divergences from the teacher's logits, and their gradients with respect to the student's."""
    scale = jnp.float32(1 / temperature)
    logits, right = logits * scale, right * scale
    log_shares = logits - _log_sum(options, logits)[:, None]
    log_right = right - _log_sum(options, right)[:, None]
    shares = jnp.exp(log_right)
    axis = options.axes and options.axes.vocabulary
    divergence = _psum(jnp.sum(shares * (log_right - log_shares), axis=1), axis)
    return divergence * jnp.float32(temperature**2), (jnp.exp(log_shares) - shares) * jnp.float32(temperature)


def _mixture(distillation: Distillation, losses: tuple[Array, Array]) -> Float[Array, "B T"]:
    """What the total has of every token."""
    share = distillation.weight
    mixed = losses[1] * jnp.float32(share)
    return mixed if share == 1 else mixed + losses[0] * jnp.float32(1 - share)


def _mixed(distillation: Distillation, losses: tuple[Array, Array], weights: Array) -> DistilledLoss:
    total = jnp.sum(_mixture(distillation, losses) * weights)
    return DistilledLoss(total, *(jnp.sum(one * weights) for one in losses))


def _no_gradients(wanted: tuple[bool, ...], rows: Array, kernel: Array, bias: Array | None) -> _Gradients:
    """Zeros in the place of those that are wanted."""
    of_x, of_kernel, of_bias = wanted
    return _Gradients(
        jnp.zeros_like(rows) if of_x else None,
        jnp.zeros(kernel.shape, jnp.float32) if of_kernel else None,
        jnp.zeros(bias.shape, jnp.float32) if of_bias and bias is not None else None,
    )


def _with_chunk(
    options: HeadOptions,
    gradients: _Gradients,
    start: Array | int,
    chunk: Float[Array, "n d"],
    kernel: Array,
    slope: Float[Array, "n v"],
) -> _Gradients:
    """The gradients with those of a chunk, given the slope of its logits."""
    rounded = slope.astype(chunk.dtype)
    if gradients.x is not None:
        of_chunk = _psum(_slope_of_rows(options, rounded, kernel), options.axes and options.axes.vocabulary)
        updated = lax.dynamic_update_slice_in_dim(gradients.x, of_chunk.astype(chunk.dtype), start, 0)
        gradients = gradients._replace(x=updated)
    if gradients.kernel is not None:
        gradients = gradients._replace(kernel=gradients.kernel + _slope_of_kernel(options, chunk, rounded))
    if gradients.bias is not None:
        gradients = gradients._replace(bias=gradients.bias + jnp.sum(slope, axis=0))
    return gradients


def _of_all_devices(options: HeadOptions, gradients: _Gradients, shape: tuple[int, ...]) -> _Gradients:
    """The gradients when all chunks are in them; `shape` is that of x."""
    if gradients.x is not None:
        gradients = gradients._replace(x=gradients.x.reshape(shape))
    if gradients.kernel is not None:
        gradients = gradients._replace(kernel=_sum_of_kernels(options, gradients.kernel))
    if gradients.bias is not None:
        gradients = gradients._replace(bias=_psum(gradients.bias, options.axes and options.axes.tokens))
    return gradients


def _over_chunks(options: HeadOptions, add_chunk: Callable, sums: Any, vocabulary: int) -> Any:
    """Goes through all tokens with `add_chunk(sums, start, size)`; the first of the sums has an entry per token."""
    tokens = jax.tree.leaves(sums)[0].shape[0]
    size = chunk_size(tokens, vocabulary, options.logit_bytes)
    count, rest = divmod(tokens, size)
    if count == 1:
        sums = add_chunk(sums, 0, size)
    else:
        sums = lax.fori_loop(0, count, lambda i, sums: add_chunk(sums, i * size, size), sums)
    return add_chunk(sums, count * size, rest) if rest else sums


def chunk_size(tokens: int, vocabulary: int, logit_bytes: int = LOGIT_BYTES) -> int:
    """How many tokens a chunk has: all of them, or else a power of two, which suits tiles of any size."""
    most = max(1, logit_bytes // (4 * vocabulary))
    return tokens if tokens <= most else 1 << (most.bit_length() - 1)


def _loss_of_logits(
    options: HeadOptions, logits: Float[Array, "n v"], targets: Int[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, " n"], Array]:
    """The losses, the logarithms of the sums of exponentials, and which logits are those of targets."""
    axis = options.axes and options.axes.vocabulary
    first = lax.axis_index(axis) * logits.shape[1] if axis else 0
    # Compared and not looked up: that is part of the loop over the logits, and so is what it gives the gradient.
    is_target = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == (targets - first)[:, None]
    log_sum = _log_sum(options, logits)
    chosen = _psum(jnp.sum(jnp.where(is_target, logits, jnp.zeros_like(logits)), axis=1), axis)
    return log_sum - chosen, log_sum, is_target


def _log_sum(options: HeadOptions, logits: Float[Array, "n v"]) -> Float[Array, " n"]:
    """The logarithms of the sums of exponentials."""
    axis = options.axes and options.axes.vocabulary
    largest = jnp.max(logits, axis=1)
    largest = lax.pmax(largest, axis) if axis else largest
    return largest + jnp.log(_psum(jnp.sum(jnp.exp(logits - largest[:, None]), axis=1), axis))


def _product(options: HeadOptions, rows: Float[Array, "n d"], kernel: Array) -> Float[Array, "n v"]:
    return _dot(rows, kernel, 1, 1 if options.transposed else 0)


def _slope_of_rows(options: HeadOptions, slope: Float[Array, "n v"], kernel: Array) -> Float[Array, "n d"]:
    return _dot(slope, kernel, 1, 0 if options.transposed else 1)


def _slope_of_kernel(options: HeadOptions, rows: Float[Array, "n d"], slope: Float[Array, "n v"]) -> Array:
    return _dot(slope, rows, 0, 0) if options.transposed else _dot(rows, slope, 0, 0)


def _dot(a: Array, b: Array, axis_of_a: int, axis_of_b: int) -> Array:
    """The product over an axis of each, accumulated and given back in float32."""
    return lax.dot_general(a, b, (((axis_of_a,), (axis_of_b,)), ((), ())), preferred_element_type=jnp.float32)


def _vocabulary(options: HeadOptions, kernel: Array) -> int:
    return kernel.shape[0 if options.transposed else 1]


class _Specs(NamedTuple):
    """How operands and results are split inside `shard_map`."""

    x: P
    kernel: P
    bias: P
    tokens: P

    @classmethod
    def of(cls, options: HeadOptions) -> "_Specs":
        batch, sequence, width, vocabulary = options.axes or LossAxes(())
        kernel = P(vocabulary, width) if options.transposed else P(width, vocabulary)
        return cls(P(batch, sequence, None), kernel, P(vocabulary), P(batch, sequence))


def _over_mesh(options: HeadOptions, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
    if options.axes is None:
        return local
    # What devices have in common is said by the specs: the checker cannot follow it through the loop.
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _whole_kernel(options: HeadOptions, kernel: Array) -> Array:
    """The kernel with the whole width: gathered once, in the dtype that the products are in."""
    if options.axes is None or not options.axes.width:
        return kernel
    return lax.all_gather(kernel, options.axes.width, axis=1 if options.transposed else 0, tiled=True)


def _sum_of_kernels(options: HeadOptions, gradient: Array) -> Array:
    """The sum of the gradients of all devices, as the kernel is split."""
    if options.axes is None:
        return gradient
    width = options.axes.width
    if width:
        axis = 1 if options.transposed else 0
        gradient = lax.psum_scatter(gradient, width, scatter_dimension=axis, tiled=True)
    return _psum(gradient, tuple(axis for axis in options.axes.tokens if axis not in width))


def _psum(array: Array, axes: str | tuple[str, ...] | None) -> Array:
    return lax.psum(array, axes) if axes else array
