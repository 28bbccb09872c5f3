"""Checks what a model is called with, where that costs nothing, so that a mistake is an error and not other logits.

Shapes and dtypes are checked always, under `jax.jit` once, when the program is traced. Values are checked outside of
programs. Inside one they are where the caller asks for it, with `jax.experimental.checkify.checkify`; without that,
nothing of the checks is left in the program.
"""

import warnings
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify
from jaxtyping import Array, Float, Int

from moe_jax.core.errors import InputError, check_member, shown
from moe_jax.functional.array_shapes import check_shape
from moe_jax.models.config import ModelConfig

Batch = Mapping[str, Array]
"""Arrays of a training batch of B rows of T tokens.

tokens, targets: Int32[B, T], a target for every token.
weights: Float32[B, T], of the targets; 0: not scored. `Decoder.loss` does without: all tokens of documents count.
segment_ids: Int32[B, T], documents of a row, counted from 1; 0 is padding. `Decoder.loss` does without: a row is one.
positions: Int32[B, T], from 0 in every document; without them, a row is one document.

For a model with an encoder also its inputs, Int32[B, S], and inputs_valid, Bool[B, S]. For one that sees, pixels,
UInt8[B, M, H, W, 3], or features, Float[B, M, n, w], and slots, Int32[B, T], as in a call.
"""

PICTURES = ("pixels", "features", "slots")
"""Names of the arrays of a batch that hold its pictures."""

Ids = Int[Array, "B T"] | Int[np.ndarray, "B T"] | Sequence[Sequence[int]]
"""Token ids: an array, or a list of equally long lists."""

_KINDS = {"integers": jnp.integer, "booleans": jnp.bool_, "floating-point numbers": jnp.floating, "bytes": jnp.uint8}


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Returns the arguments of a model for a batch; without `positions`, a row is one document."""
    given: dict[str, Any] = {name: batch[name] for name in ("tokens", *PICTURES) if name in batch}
    if "inputs" not in batch:
        return given | {"positions": batch.get("positions"), "segment_ids": batch.get("segment_ids")}
    given |= {"inputs": batch["inputs"], "inputs_valid": batch.get("inputs_valid")}
    return given | {"valid": jnp.asarray(batch["segment_ids"]) > 0 if "segment_ids" in batch else None}


def targets_and_weights(batch: Batch) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """Returns the targets of a batch and their weights, which are 1 for all tokens of documents unless it has others.

    Raises:
      InputError: for a key that means nothing, and where one is missing.
    """
    if not isinstance(batch, Mapping):
        raise InputError("the batch is no mapping; expected one of tokens, targets, and perhaps more")
    known = ("tokens", "targets", "weights", "segment_ids", "positions", "inputs", "inputs_valid", *PICTURES)
    for name in batch:
        check_member("key of a batch", name, (*known, "cut"))
    for name in ("tokens", "targets"):
        if name not in batch:
            raise InputError(f"the batch has no {name}; it has {', '.join(batch)}")
    shape = as_array("tokens", batch["tokens"], "integers", (...,)).shape
    targets = jnp.asarray(as_array("targets", batch["targets"], "integers", shape))
    if "weights" in batch:
        return targets, jnp.asarray(as_array("weights", batch["weights"], "floating-point numbers", shape), jnp.float32)
    if batch.get("segment_ids") is None:
        return targets, jnp.ones(shape, jnp.float32)
    segments = as_array("segment_ids", batch["segment_ids"], "integers", shape)
    return targets, (jnp.asarray(segments) > 0).astype(jnp.float32)


def as_array(name: str, given: Any, kind: str, shape: tuple[int | None | EllipsisType, ...]) -> Array:
    """Returns an argument as an array; a list, or nested ones, may stand for one.

    Args:
      name: of the argument.
      given: an array or a list.
      kind: a key of `_KINDS`: what it holds.
      shape: as in `check_shape`.

    Raises:
      InputError: for another shape, or other values.
    """
    array = _array_of(name, given, kind)
    check_shape(name, array, shape)
    if not jnp.issubdtype(array.dtype, _KINDS[kind]):
        raise InputError(f"{name} is of {array.dtype}, expected {kind}")
    return array


def _array_of(name: str, given: Any, kind: str) -> Any:
    array = given
    if isinstance(given, list | tuple):
        try:
            array = np.asarray(given)
        except ValueError:
            raise InputError(
                f"{name}: the rows are not equally long; pad them, and say with valid= what counts"
            ) from None
    if not hasattr(array, "shape") or not hasattr(array, "dtype") or array.dtype.kind in "OUS":
        raise InputError(f"{name} is {shown(given)}, expected an array of {kind}")
    return array


def as_ids(name: str, given: Any, vocab_size: int) -> Int[Array, "B T"]:
    """Returns token ids as an array.

    Raises:
      InputError: for another shape than [B, T], no tokens, what is no integer, or an id outside of the vocabulary.
    """
    if len(_array_of(name, given, "integers").shape) == 1:
        raise InputError(f"{name} has one axis, expected (batch, length): a batch of one text is [{name}]")
    ids = as_array(name, given, "integers", (None, None))
    if 0 in ids.shape:
        raise InputError(f"{name} has the shape {tuple(ids.shape)}: there are no tokens")
    check_range(name, ids, vocab_size, f"ids of a vocabulary of {vocab_size}")
    return jnp.asarray(ids, ids.dtype if ids.dtype.itemsize <= 4 else jnp.int32)


def check_range(name: str, array: Array, end: int, what: str) -> None:
    """Raises `InputError` unless all values are at least 0 and below `end`; inside a program see above."""
    if is_traced(array):
        checkify.debug_check(jnp.all((array >= 0) & (array < end)), f"{name} has values that are no {what}")
        return
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return
    values = np.asarray(array)
    outside = (values < 0) | (values >= end)
    if outside.any():
        at = tuple(int(index) for index in np.argwhere(outside)[0])
        raise InputError(f"{name} has {int(values[at])} at {list(at)}, expected {what}: 0 to {end - 1}")


def warn_of_length(length: int, config: ModelConfig) -> None:
    """Warns of texts that are longer than those that a model was made for; those that it cannot take are errors."""
    if length > config.max_positions and not config.has_encoder:
        warnings.warn(
            f"tokens are {length} long, but the model was made for {config.max_positions} positions", stacklevel=3
        )


def check_key(key: Any) -> None:
    """Raises `InputError` unless a random key is one, or None."""
    if key is None:
        return
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    is_new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    is_raw = dtype == jnp.uint32 and shape is not None and len(shape) == 1
    if not (is_new or is_raw):
        found = shown(key) if shape is None else f"an array {shape} of {dtype}"
        raise InputError(f"key is {found}, expected one random key, such as jax.random.key(0)")


def is_traced(array: Any) -> bool:
    """Whether the values of an array are not known yet, as inside a program."""
    return isinstance(array, Tracer)
