"""The head of a model, in chunks of tokens: the common parts of all losses of its logits.

The logits of all tokens at once, [N, V] in float32, would be the largest array of a training step (20 GB for 32,768
tokens and a vocabulary of 151,936). Here the logits of one chunk are computed, used and dropped.

Over a mesh the tokens are split over the batch axes and the vocabulary over another (`shard_map`). Left to itself, the
compiler would add up the gradient of the kernel over the devices after every chunk, and not once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

LOGIT_BYTES = 768 << 20
"""Most bytes of a chunk's float32 logits on a device, unless a single token's logits take more."""


LEAST_PRODUCT = 1 << 30
"""Multiplications of a head below which tokens that are not scored cost less than what leaves them out."""
_SHARES = (4, 2)  # of the tokens: a quarter or a half of them may be enough


class LossAxes(NamedTuple):
    """Axes of the mesh in use that split the operands; an operand that no axis splits is whole on every device.

    Attributes:
      batch: axes that split the rows.
      sequence: axis that splits the tokens of a row; None: there is none.
      width: those of the axes above that also split the width of the kernel (fully sharded parameters).
      vocabulary: axis that splits the columns of the kernel and the bias; None: there is none.
    """

    batch: tuple[str, ...]
    sequence: str | None = None
    width: tuple[str, ...] = ()
    vocabulary: str | None = None

    @property
    def tokens(self) -> tuple[str, ...]:
        """The axes that split the tokens of a batch."""
        return self.batch if self.sequence is None else (*self.batch, self.sequence)


class HeadOptions(NamedTuple):
    """The properties of a head, apart from its arrays.

    Attributes:
      scale: of the logits.
      soft_cap: scaled logits become `c tanh(logits / c)`; None: no cap.
      transposed: the kernel is [V, d], as an embedding is, and not [d, V].
      axes: axes of the mesh; None: there is one device.
      logit_bytes: most bytes of a chunk's logits, see `LOGIT_BYTES`. The result does not depend on it.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    transposed: bool = False
    axes: LossAxes | None = None
    logit_bytes: int = LOGIT_BYTES


def finish_logits(
    products: Float[Array, "... V"], bias: Float[Array, " V"] | None, scale: float, soft_cap: float | None
) -> Float[Array, "... V"]:
    """Returns the logits `cap(scale * (products + b))`, float32."""
    logits = products
    if bias is not None:
        logits = logits + jnp.expand_dims(bias.astype(jnp.float32), tuple(range(logits.ndim - 1)))
    if scale != 1.0:
        logits = logits * jnp.float32(scale)
    return logits if soft_cap is None else jnp.tanh(logits / jnp.float32(soft_cap)) * jnp.float32(soft_cap)


class HeadGradients(NamedTuple):
    """Gradients of x, kernel and bias: None where not wanted. Those of kernel and bias are float32."""

    x: Array | None
    kernel: Array | None
    bias: Array | None


def primal_values(*primals: Any) -> tuple:
    """Returns the arrays that a forward rule with symbolic zeros gets as its arguments."""

    def is_primal(value: Any) -> bool:
        return isinstance(value, jax.custom_derivatives.CustomVJPPrimal)

    return jax.tree.map(lambda primal: primal.value, primals, is_leaf=is_primal)


def wanted_gradients(*primals: Any) -> tuple[bool, ...]:
    """Returns for each argument of a forward rule with symbolic zeros whether its gradient is wanted."""
    return tuple(primal is not None and primal.perturbed for primal in primals)


def cast_gradients(gradients: HeadGradients, kernel: Array, bias: Array | None) -> HeadGradients:
    """Casts the gradients of kernel and bias to the dtypes of kernel and bias."""
    own = (gradients.kernel, kernel), (gradients.bias, bias)
    cast = (None if one is None or leaf is None else one.astype(leaf.dtype) for one, leaf in own)
    return HeadGradients(gradients.x, *cast)


def scaled_gradients(losses: Float[Array, "B T"], gradients: HeadGradients, cotangent: Float[Array, ""]) -> tuple:
    """Returns cotangents of x, kernel, bias, targets and weights, given the gradients of `sum(weights * losses)`."""

    def scaled(gradient: Array) -> Array:
        return (gradient.astype(jnp.float32) * cotangent).astype(gradient.dtype)

    return (*jax.tree.map(scaled, tuple(gradients)), None, losses * cotangent)


def no_gradients(wanted: tuple[bool, ...], rows: Array, kernel: Array, bias: Array | None) -> HeadGradients:
    """Returns zeros for every gradient that is wanted: of x, kernel and bias, or () for none."""
    of_x, of_kernel, of_bias = wanted or (False, False, False)
    return HeadGradients(
        jnp.zeros_like(rows) if of_x else None,
        jnp.zeros(kernel.shape, jnp.float32) if of_kernel else None,
        jnp.zeros(bias.shape, jnp.float32) if of_bias and bias is not None else None,
    )


def with_gradients_of_chunk(
    options: HeadOptions, gradients: HeadGradients, start: Array | int, chunk: Array, kernel: Array, slope: Array
) -> HeadGradients:
    """Adds the gradients of one chunk to `gradients`, given the slope of the chunk's logits."""
    rounded = slope.astype(chunk.dtype)
    if gradients.x is not None:
        of_chunk = _dot(rounded, kernel, 1, 0 if options.transposed else 1)
        of_chunk = sum_over_axes(of_chunk, options.axes and options.axes.vocabulary)
        updated = lax.dynamic_update_slice_in_dim(gradients.x, of_chunk.astype(chunk.dtype), start, 0)
        gradients = gradients._replace(x=updated)
    if gradients.kernel is not None:
        factors = (rounded, chunk) if options.transposed else (chunk, rounded)
        gradients = gradients._replace(kernel=gradients.kernel + _dot(*factors, 0, 0))
    if gradients.bias is not None:
        gradients = gradients._replace(bias=gradients.bias + jnp.sum(slope, axis=0))
    return gradients


def gradients_of_all_devices(options: HeadOptions, gradients: HeadGradients, shape: tuple[int, ...]) -> HeadGradients:
    """Completes the gradients over all devices, once all chunks are added; `shape` is that of x."""
    if gradients.x is not None:
        gradients = gradients._replace(x=gradients.x.reshape(shape))
    if gradients.kernel is not None and options.axes is not None:
        summed, width = gradients.kernel, options.axes.width
        if width:
            # Split as the kernel is.
            axis = 1 if options.transposed else 0
            summed = lax.psum_scatter(summed, width, scatter_dimension=axis, tiled=True)
        others = tuple(axis for axis in options.axes.tokens if axis not in width)
        gradients = gradients._replace(kernel=sum_over_axes(summed, others))
    if gradients.bias is not None:
        gradients = gradients._replace(bias=sum_over_axes(gradients.bias, options.axes and options.axes.tokens))
    return gradients


def over_chunks(options: HeadOptions, add_chunk: Callable, sums: Any, kernel: Array) -> Any:
    """Runs `add_chunk(sums, start, size)` over all tokens; the first array of the sums has an entry per token."""
    tokens, vocabulary = jax.tree.leaves(sums)[0].shape[0], kernel.shape[0 if options.transposed else 1]
    if not tokens:
        return sums
    size = chunk_size(tokens, vocabulary, options.logit_bytes)
    count, remainder = divmod(tokens, size)
    if count == 1:
        sums = add_chunk(sums, 0, size)
    else:
        sums = lax.fori_loop(0, count, lambda i, sums: add_chunk(sums, i * size, size), sums)
    return add_chunk(sums, count * size, remainder) if remainder else sums


def chunk_size(tokens: int, vocabulary: int, logit_bytes: int = LOGIT_BYTES) -> int:
    """Returns the number of tokens of a chunk: all of them, or a power of two, which suits tiles of any size."""
    most = max(1, logit_bytes // (4 * vocabulary))
    return tokens if tokens <= most else 1 << (most.bit_length() - 1)


def smaller_sizes(options: HeadOptions, tokens: int, width: int, vocabulary: int) -> list[int]:
    """Returns the numbers of tokens that may be computed in place of all, least first; empty where it does not pay.

    Devices that share a vocabulary would wait for each other inside of a branch, and therefore compute all tokens.
    """
    if tokens * width * vocabulary < LEAST_PRODUCT or (options.axes is not None and options.axes.vocabulary):
        return []
    return [-(-tokens // share) for share in _SHARES]


def loss_of_logits(
    options: HeadOptions, logits: Float[Array, "n v"], targets: Int[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, " n"], Array]:
    """Returns the losses, the logarithms of the sums of exponentials, and which logits are those of targets."""
    axis = options.axes and options.axes.vocabulary
    first = lax.axis_index(axis) * logits.shape[1] if axis else 0
    # Compared, not looked up: the comparison, and its part in the gradient, fuse with the loop over the logits.
    is_target = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == (targets - first)[:, None]
    log_sum = log_sum_of_exponentials(options, logits)
    chosen = sum_over_axes(jnp.sum(jnp.where(is_target, logits, jnp.zeros_like(logits)), axis=1), axis)
    return log_sum - chosen, log_sum, is_target


def log_sum_of_exponentials(options: HeadOptions, logits: Float[Array, "n v"]) -> Float[Array, " n"]:
    """Returns the logarithm of the sum of exponentials of every row, over the devices that split the vocabulary."""
    axis = options.axes and options.axes.vocabulary
    largest = jnp.max(logits, axis=1)
    largest = lax.pmax(largest, axis) if axis else largest
    return largest + jnp.log(sum_over_axes(jnp.sum(jnp.exp(logits - largest[:, None]), axis=1), axis))


def products_of_chunk(options: HeadOptions, rows: Float[Array, "n d"], kernel: Array) -> Float[Array, "n v"]:
    """Returns the product of rows and kernel, float32: the logits before bias, scale and cap."""
    return _dot(rows, kernel, 1, 1 if options.transposed else 0)


def _dot(a: Array, b: Array, axis_of_a: int, axis_of_b: int) -> Array:
    """Returns the product over one axis of each operand, accumulated and returned in float32."""
    return lax.dot_general(a, b, (((axis_of_a,), (axis_of_b,)), ((), ())), preferred_element_type=jnp.float32)


class HeadSpecs(NamedTuple):
    """Partition specs of operands and results inside `shard_map`."""

    x: P
    kernel: P
    bias: P
    tokens: P

    @classmethod
    def of(cls, options: HeadOptions) -> "HeadSpecs":
        """Returns the specs of a head, from its axes."""
        batch, sequence, width, vocabulary = options.axes or LossAxes(())
        kernel = P(vocabulary, width) if options.transposed else P(width, vocabulary)
        return cls(P(batch, sequence, None), kernel, P(vocabulary), P(batch, sequence))


def over_mesh(options: HeadOptions, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Returns a function that runs `local` on every device's part of the operands."""
    if options.axes is None:
        return local
    # The specs say which values are equal on all devices: the checker cannot follow this through the loop.
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def whole_kernel(options: HeadOptions, kernel: Array) -> Array:
    """Returns the kernel with its whole width: gathered once, in the dtype of the products."""
    if options.axes is None or not options.axes.width:
        return kernel
    return lax.all_gather(kernel, options.axes.width, axis=1 if options.transposed else 0, tiled=True)


def sum_over_axes(array: Array, axes: str | tuple[str, ...] | None) -> Array:
    """Returns the sum over devices along these axes; without axes, the array itself."""
    return lax.psum(array, axes) if axes else array
