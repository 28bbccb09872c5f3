"""How tokens come to experts over a mesh, and the exchange by which rows travel there and the outputs travel back.

The attribute `exchange` of a bank says which of two ways is taken (`experts.over_mesh`). It is set when the
bank is made, from the environment variable MOE_JAX_EXCHANGE, and can be changed later with `set_exchange`. Like the
strategy it is part of the graphdef. What follows is about all-to-all.

Every device sorts the assignments of its own tokens by expert, and so by device. What it sends depends on the routing;
what it has room for does not: a round brings at most so many rows to a device, the *capacity*, by default twice the
share that each would get if all experts were chosen alike. What is more waits for another round (`in_rounds`).

TPUs and GPUs send exactly the rows that there are (`ragged_all_to_all`). Elsewhere every pair of devices exchanges as
many rows, the capacity divided by the number of devices, and what is not used is padding.
"""

import math
import os
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.core.errors import InputError, nearest, shown
from moe_jax.experts.devices import current_chip

AXIS = "expert"
DEFAULT_CAPACITY = 2.0
"""Rows that a device has room for, in multiples of the even share."""

WAYS = ("auto", "all-gather", "all-to-all")

ENVIRONMENT = "MOE_JAX_EXCHANGE"


class Exchange(NamedTuple):
    """How tokens come to experts.

    Attributes:
      way: one of `WAYS`; `auto` is the one that sends fewer bytes.
      capacity: how many rows a device has room for in a round, in multiples of the even share.
    """

    way: str = "auto"
    capacity: float = DEFAULT_CAPACITY

    @classmethod
    def parse(cls, text: str, where: str) -> "Exchange":
        """From `WAY`, `all-gather:CAPACITY` or `all-to-all:CAPACITY`.

        Raises:
          InputError: if it is neither; the message names `where`.
        """
        way, colon, capacity = text.partition(":")
        if way not in WAYS or colon and way == "auto":
            known = "auto, all-gather, all-to-all, all-gather:CAPACITY or all-to-all:CAPACITY"
            raise InputError(f"{where} is {shown(text)}{nearest(way, WAYS)}; it is {known}")
        if not colon:
            return cls(way)
        try:
            found = float(capacity)
        except ValueError:
            found = math.nan
        if not 0 < found < math.inf:
            raise InputError(f"{where} is {shown(text)}: the capacity is a number above 0")
        return cls(way, found)

    def chosen(self, devices: int, top_k: int) -> str:
        """`all-gather` or `all-to-all`, for so many devices along `expert`.

        Of its t tokens a device gets those of the others, and the same number of sums comes back, (n - 1) t each; or
        rows of its k t assignments travel, all but those that stay.
        """
        if self.way != "auto":
            return self.way
        return "all-gather" if devices <= top_k else "all-to-all"


DEFAULT = Exchange()


def exchange_from_environment() -> Exchange:
    """Returns the exchange that MOE_JAX_EXCHANGE names; the default if it is not set.

    Raises:
      InputError: see `Exchange.parse`.
    """
    return Exchange.parse(os.environ.get(ENVIRONMENT, "auto"), ENVIRONMENT)


class Buffer(NamedTuple):
    """The rows that a device receives in a round.

    Attributes:
      rows: that it has room for.
      ragged: whether exactly the rows that there are travel; otherwise equally many between every two devices.
    """

    rows: int
    ragged: bool

    @classmethod
    def of(cls, rows: int, devices: int, capacity: float, *, ragged: bool) -> "Buffer":
        """For so many rows of every device; `rows` is then a multiple of the number of devices."""
        return cls(devices * max(1, math.ceil(capacity * rows / devices)), ragged)


class Plan(NamedTuple):
    """One round, as one device sees it; an entry for each of the n devices.

    Attributes:
      first: the first of its sorted rows that goes to a device.
      sent: how many rows go there.
      there: where these begin in the buffer of that device.
      place: where the rows of a device begin in this buffer.
      received: how many rows come from it.
      origin: the first of these among the sorted rows of that device.
      experts: the local expert of every row of the buffer; that of rows that there are not is e.
    """

    first: Int[Array, " n"]
    sent: Int[Array, " n"]
    there: Int[Array, " n"]
    place: Int[Array, " n"]
    received: Int[Array, " n"]
    origin: Int[Array, " n"]
    experts: Int[Array, " B"]


def rounds_needed(counts: Int[Array, "n n e"], buffer: Buffer) -> Int[Array, ""]:
    """How many rounds bring all rows to their experts.

    Args:
      counts: how many rows a device has for each of the e experts of another, by sender, receiver and expert.
      buffer: of every device.
    """
    pairs = jnp.sum(counts, axis=2)
    if buffer.ragged:
        return ceil_div(jnp.max(jnp.sum(pairs, axis=0)), buffer.rows)
    return ceil_div(jnp.max(pairs), buffer.rows // counts.shape[0])


def make_plan(counts: Int[Array, "n n e"], buffer: Buffer, number: Int[Array, ""] | int) -> Plan:
    """Plans a round; inside `shard_map`.

    Args:
      counts, buffer: see `rounds_needed`.
      number: of the round, from 0 on.
    """
    devices, me = counts.shape[0], lax.axis_index(AXIS)
    pairs = jnp.sum(counts, axis=2)
    if buffer.ragged:
        # The rows for a device, sender after sender, are cut into rounds.
        begin = _before(pairs, axis=0)
        low = jnp.clip(number * buffer.rows - begin, 0, pairs)
        high = jnp.clip((number + 1) * buffer.rows - begin, 0, pairs)
        place = begin + low - number * buffer.rows
    else:
        share = buffer.rows // devices
        low, high = (jnp.minimum(edge * share, pairs) for edge in (number, number + 1))
        place = jnp.broadcast_to(share * jnp.arange(devices, dtype=pairs.dtype)[:, None], pairs.shape)
    # Negative where all rows of a sender came before this round.
    place = jnp.maximum(place, 0)
    first, sent = _before(pairs, axis=1) + low, high - low
    position = jnp.arange(buffer.rows, dtype=pairs.dtype)
    sender = jnp.searchsorted(place[:, me], position, side="right") - 1
    within = position - place[sender, me]
    # The rows that a sender has for this device are sorted by expert.
    ends = jnp.cumsum(counts[:, me], axis=1, dtype=pairs.dtype)
    expert = jnp.sum((low[sender, me] + within)[:, None] >= ends[sender], axis=1, dtype=pairs.dtype)
    experts = jnp.where(within < sent[sender, me], expert, counts.shape[2])
    return Plan(first[me], sent[me], place[me], place[:, me], sent[:, me], first[:, me], experts)


def _before(sizes: Array, *, axis: int) -> Array:
    """The sums of all entries before each."""
    return jnp.cumsum(sizes, axis=axis, dtype=sizes.dtype) - sizes


def _exchange_ragged(rows: Array, into: Array, first: Array, sent: Array, there: Array, received: Array) -> Array:
    return lax.ragged_all_to_all(rows, into, first, sent, there, received, axis_name=AXIS)


# Each of the two is the transpose of the other: autodiff would make scatters of the gathers.
@partial(jax.custom_vjp, nondiff_argnums=(2,))
def send(rows: Float[Array, "M d"], plan: Plan, buffer: Buffer) -> Float[Array, "B d"]:
    """The rows of a round, as they arrive; zeros where there are none.

    Args:
      rows: of this device's tokens, sorted by expert.
      plan: of the round.
      buffer: of every device.
    """
    if buffer.ragged:
        into = jnp.zeros((buffer.rows, rows.shape[1]), rows.dtype)
        return _exchange_ragged(rows, into, plan.first, plan.sent, plan.there, plan.received)
    # The same number of rows for every device; those of padding are zero.
    devices, share = plan.first.shape[0], buffer.rows // plan.first.shape[0]
    within = jnp.arange(share, dtype=plan.first.dtype)[None, :]
    picked = _pick(rows, plan.first[:, None] + within, within < plan.sent[:, None])
    return lax.all_to_all(picked.reshape(devices * share, -1), AXIS, 0, 0, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def send_back(rows: Float[Array, "B d"], plan: Plan, buffer: Buffer, count: int) -> Float[Array, "M d"]:
    """Undoes `send`: rows where they came from; zeros in the place of those of other rounds.

    Args:
      rows: of the buffer.
      plan, buffer: as they were sent.
      count: M.
    """
    if buffer.ragged:
        into = jnp.zeros((count, rows.shape[1]), rows.dtype)
        return _exchange_ragged(rows, into, plan.place, plan.received, plan.origin, plan.sent)
    share = buffer.rows // plan.first.shape[0]
    returned = lax.all_to_all(rows, AXIS, 0, 0, tiled=True)
    # Sorted row m went to the last device whose rows begin at or before it.
    row = jnp.arange(count, dtype=plan.first.dtype)
    device = jnp.maximum(jnp.searchsorted(plan.first, row, side="right") - 1, 0)
    within = row - plan.first[device]
    return _pick(returned, device * share + within, (within >= 0) & (within < plan.sent[device]))


def _pick(rows: Array, indices: Array, exist: Array) -> Array:
    """The rows with these indices where they exist, else zeros."""
    picked = jnp.take(rows, indices, axis=0, mode="clip")
    return jnp.where(exist[..., None], picked, jnp.zeros((), rows.dtype))


def _send_fwd(rows: Array, plan: Plan, buffer: Buffer) -> tuple[Array, tuple[Plan, Array]]:
    return send(rows, plan, buffer), (plan, rows[:, :0])


def _send_bwd(buffer: Buffer, saved: tuple[Plan, Array], dy: Array) -> tuple[Array, None]:
    plan, like = saved
    return send_back(dy, plan, buffer, like.shape[0]), None


send.defvjp(_send_fwd, _send_bwd)
send_back.defvjp(
    lambda rows, plan, buffer, count: (send_back(rows, plan, buffer, count), plan),
    lambda buffer, count, plan, dy: (send(dy, plan, buffer), None),
)


def ceil_div(value: Int[Array, ""], divisor: int) -> Int[Array, ""]:
    """The least whole number that is at least the quotient."""
    return -(-value // divisor)


# From so many devices on, a slice of TPUs has them along two sides at least.
_TWO_SIDES = 16


def gathered(array: Array, split: P, whole: P, dtype: DTypeLike) -> Array:
    """An array of which this device has a part: rounded, and then gathered. The gradient is summed in float32.

    Args:
      array: the part; inside `shard_map`.
      split: how it is split.
      whole: how what is returned is split: the same, or without the axes of one dimension.
      dtype: to which it is rounded if it is gathered.
    """
    if split == whole:
        return array
    axis = next(number for number, (one, other) in enumerate(zip(split, whole, strict=True)) if one != other)
    return _round_and_gather(array, axis, split[axis], jnp.dtype(dtype))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _round_and_gather(array: Array, axis: int, along: str | tuple[str, ...], dtype: jnp.dtype) -> Array:
    return lax.all_gather(array.astype(dtype), along, axis=axis, tiled=True)


def _round_and_gather_forward(array: Array, axis: int, along: Any, dtype: jnp.dtype) -> tuple[Array, Array]:
    return _round_and_gather(array, axis, along, dtype), jnp.zeros((), array.dtype)


def _round_and_gather_backward(axis: int, along: Any, dtype: jnp.dtype, like: Array, cotangent: Array) -> tuple[Array]:
    # Of an array whose first axis is 1, the TPU compiler makes an all-reduce and a slice: twice as many bytes.
    leading = axis if set(cotangent.shape[:axis]) == {1} else 0
    whole = cotangent.reshape(cotangent.shape[leading:]).astype(jnp.float32)
    summed = scattered_sum(whole, along, axis - leading, in_two=current_chip().platform == "tpu")
    return (summed.reshape(*[1] * leading, *summed.shape).astype(like.dtype),)


_round_and_gather.defvjp(_round_and_gather_forward, _round_and_gather_backward)


def scattered_sum(array: Array, along: str | tuple[str, ...], axis: int, *, in_two: bool) -> Array:
    """The sum over all devices along mesh axes, of which each gets its part; see `lax.psum_scatter`.

    Args:
      array: of this device; inside `shard_map`.
      along: the mesh axes.
      axis: of the array, which is cut into parts.
      in_two: many devices do it in two steps, each along one side of the slice, first with those that are far from one
        another in the order of the mesh. The TPU compiler makes an all-reduce of one step over two sides.
    """
    size = lax.axis_size(along)
    side = math.isqrt(size)
    if not in_two or isinstance(along, tuple) or size < _TWO_SIDES or size & (size - 1):
        return lax.psum_scatter(array, along, scatter_dimension=axis, tiled=True)
    rows = 1 << (side.bit_length() - 1)
    columns = size // rows
    far = [[row * columns + column for row in range(rows)] for column in range(columns)]
    near = [[row * columns + column for column in range(columns)] for row in range(rows)]
    scatter = partial(lax.psum_scatter, axis_name=along, scatter_dimension=axis, tiled=True)
    return scatter(scatter(array, axis_index_groups=far), axis_index_groups=near)
