"""Training on batches in memory: the steps of a run, without its files."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import local_rows, place
from moe_jax.model_io.frozen_tower import FrozenTower
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.nn import Decoder
from moe_jax.nn.inputs import PICTURES
from moe_jax.nn.projector import shape_of_features, tokens_per_picture
from moe_jax.training.loop import Diverged, divergence
from moe_jax.training.metrics import Record, is_finite, to_record
from moe_jax.training.program import (
    check_tower_is_frozen,
    check_tower_of_teacher,
    first_state,
    initial_states,
    load_teacher,
    make_program,
)
from moe_jax.training.recipe import Recipe
from moe_jax.training.train_state import averaged_params

Tokens = Int[np.ndarray, "B T"]
Batch = Tokens | Mapping[str, np.ndarray]
_DTYPES = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), np.int32) | {"weights": np.float32}
# Likewise for one with an encoder.
_INPUTS = {"inputs": np.int32, "inputs_valid": np.bool_}


def train_on_batches(
    recipe: Recipe,
    source: ModelSource,
    batches: Iterable[Batch],
    *,
    devices: list[Any] | None = None,
    on_step: Callable[[Record], object] = lambda record: None,
    teacher: ModelSource | None = None,
) -> tuple[Decoder, Record]:
    """Trains until `recipe.train.steps` steps are done or there are no batches left.

    Returns the trained model, with the average if the recipe exports one, and the record of the last step, empty if
    there was none.

    Args:
      recipe: optimizer, schedule, partition, dtypes, mesh, seed. Its run directory, data, checkpoints, log and
        evaluation are ignored.
      source: the model to begin with, which is not changed.
      batches: see `read_batch`; all of one shape, with the recipe's number of rows.
      devices: of the mesh; default all.

    Raises:
      InputError: for a batch that cannot be read, and as `make_program`; `Diverged` if the loss is no longer finite.
    """
    program = make_program(recipe, source.config, devices, teacher=None if teacher is None else teacher.config)
    size = recipe.train.batch_size
    rows, last = local_rows(program.mesh, size), {}

    def report(record: Record) -> Record:
        if not is_finite(record):
            raise Diverged(f"{divergence(record)}; try a lower optimizer.learning_rate")
        on_step(record)
        return record

    with jax.set_mesh(program.mesh):
        params, frozen = initial_states(program, recipe, source)
        state, pending = first_state(program, params), None
        taught, unchecked = () if teacher is None else (load_teacher(program, teacher),), teacher
        # No batch is taken from the iterator that is not used.
        for step, batch in enumerate(itertools.islice(batches, recipe.train.steps), start=1):
            arrays = read_batch(batch, source.config)
            if "features" in arrays:
                check_tower_is_frozen(program.trainable)
                if unchecked is not None:
                    dtypes = {"param_dtype": recipe.model.frozen_dtype, "compute_dtype": recipe.model.compute_dtype}
                    check_tower_of_teacher(FrozenTower(source, **dtypes), unchecked)
                    unchecked = None
            if (found := len(arrays["tokens"])) != size:
                raise InputError(f"batch {step} has {found} rows, expected train.batch_size = {size}")
            placed = place({name: array[rows] for name, array in arrays.items()}, rows, program.mesh, size)
            state, metrics = program.step(state, frozen, placed, *taught)
            # The devices are at work on this step while the previous one is reported.
            if pending is not None:
                last = report(to_record(program.model, *pending))
            pending = step, metrics
        if pending is not None:
            last = report(to_record(program.model, *pending))
    params = averaged_params(state, recipe.ema is not None and recipe.ema.export)
    model = nnx.merge(program.graphdef, params, frozen)
    model.config = dataclasses.replace(recipe.moe.applied(source.config), dtype=recipe.model.param_dtype)
    return model, last


def read_batch(batch: Batch, config: ModelConfig) -> dict[str, np.ndarray]:
    """Converts a batch, given as `moe_jax.train` takes it, to the arrays of a training step.

    Returns `tokens`, `targets`, `segment_ids`, `positions` Int32[B, T] and `weights` Float32[B, T]; for a model with an
    encoder also `inputs` Int32[B, S], `inputs_valid` Bool[B, S] and `cut` Int32[B, 2], all zeros; and `tokens` are by
    default the targets, shifted. Where there are pictures also `pixels` UInt8[B, M, H, W, 3], or `features`
    Float[B, M, n, w], and `slots` Int32[B, T].

    Raises:
      InputError: for other names, shapes, or ids outside the vocabulary.
    """
    if config.has_encoder:
        return _read_pairs(batch, config)
    if isinstance(batch, Mapping):
        given = {name: np.asarray(array) for name, array in batch.items()}
    else:
        tokens = np.asarray(batch)
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise InputError(f"a batch of shape {tokens.shape}; expected token ids of shape [rows, at least 2]")
        given = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    optional = _OPTIONAL if config.vision is None else (*_OPTIONAL, *PICTURES)
    pictures = {name: given.pop(name) for name in PICTURES if name in optional and name in given}
    unknown = [name for name in given if name not in _DTYPES]
    if unknown or not {"tokens", "targets"} <= given.keys():
        raise InputError(f"a batch of {', '.join(given)}; expected tokens, targets, and perhaps {', '.join(optional)}")
    read = _checked(given, config.vocab_size)
    return read | (_checked_pictures(pictures, config, read["tokens"].shape) if pictures else {})


def _checked_pictures(
    given: dict[str, np.ndarray], config: ModelConfig, shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Checks pixels, or features, and slots for [B, T] tokens."""
    vision = config.check_sees("pictures")
    if len(given) != 2 or "slots" not in given:
        only = "alone" if len(given) == 1 else "together"
        raise InputError(
            f"a batch has {', '.join(given)} {only}; slots go with pixels, or with features in their place"
        )
    (name, seen), slots = next(iter(given.items())), given["slots"]
    sizes = (*vision.processing.size, 3) if name == "pixels" else shape_of_features(vision)
    is_kind = seen.dtype == np.uint8 if name == "pixels" else jnp.issubdtype(seen.dtype, jnp.floating)
    if not is_kind or seen.ndim != 2 + len(sizes) or (len(seen), *seen.shape[2:]) != (shape[0], *sizes):
        axes, kind = ("H, W, 3", "uint8") if name == "pixels" else ("n, w", "float")
        raise InputError(
            f"{name} of a batch are {seen.dtype}{list(seen.shape)}; expected {kind} [B, M, {axes}] of M pictures for "
            f"every row, here {kind}[{shape[0]}, M, {', '.join(map(str, sizes))}]"
        )
    if slots.dtype.kind not in "iu" or slots.shape != shape:
        raise InputError(f"slots of a batch are {slots.dtype}{list(slots.shape)}; expected integers {list(shape)}")
    most = seen.shape[1] * tokens_per_picture(vision, config.d_model)
    if slots.min() < 0 or slots.max() > most:
        raise InputError(
            f"slots of a batch go from {slots.min()} to {slots.max()}; a row's {seen.shape[1]} pictures have {most} "
            "features, counted from 1, and 0 leaves a token"
        )
    return {name: seen, "slots": np.asarray(slots, np.int32)}


def _read_pairs(batch: Batch, config: ModelConfig) -> dict[str, np.ndarray]:
    """Converts a batch for a model with an encoder."""
    given = {name: np.asarray(array) for name, array in batch.items()} if isinstance(batch, Mapping) else {}
    if not {"inputs", "targets"} <= given.keys() <= {*_DTYPES, *_INPUTS}:
        raise InputError(
            f"a batch of {', '.join(given) or 'tokens alone'}; for a model with an encoder expected inputs, targets, "
            f"and perhaps tokens, inputs_valid, {', '.join(_OPTIONAL)}"
        )
    inputs = {name: given.pop(name) for name in _INPUTS if name in given}
    inputs.setdefault("inputs_valid", np.ones(inputs["inputs"].shape, bool))
    if "tokens" not in given and given["targets"].ndim == 2:
        start = np.full((len(given["targets"]), 1), config.decoder_start_id)
        given["tokens"] = np.concatenate([start, given["targets"][:, :-1]], axis=1)
    read = _checked(given, config.vocab_size)
    shape = (len(read["targets"]), *inputs["inputs"].shape[1:])
    for name, array in inputs.items():
        if array.ndim != 2 or array.shape != shape or not shape[1]:
            raise InputError(f"{name} of a batch has shape {array.shape}; expected [B, S], here {shape}")
    _check_ids("inputs", inputs["inputs"], config.vocab_size)
    nothing_cut = {"cut": np.zeros((len(read["targets"]), 2), np.int32)}  # as batches of files say it
    return read | {name: np.asarray(inputs[name], dtype) for name, dtype in _INPUTS.items()} | nothing_cut


def _checked(given: dict[str, np.ndarray], vocab_size: int) -> dict[str, np.ndarray]:
    """Checks the arrays given for [B, T] tokens, and adds the missing ones."""
    shape = given["targets"].shape if "tokens" not in given else given["tokens"].shape
    for name, array in given.items():
        if array.ndim != 2 or array.shape != shape:
            raise InputError(f"{name} of a batch has shape {array.shape}, tokens have {shape}; expected [B, T] of both")
        if name not in ("weights", "tokens", "targets") and array.dtype.kind not in "iu":
            raise InputError(f"{name} of a batch has dtype {array.dtype}, expected integers")
    for name in ("tokens", "targets"):
        _check_ids(name, given[name], vocab_size)
    given.setdefault("segment_ids", np.ones(shape))
    given.setdefault("positions", _positions(given["segment_ids"]))
    given.setdefault("weights", np.asarray(given["segment_ids"]) > 0)
    return {name: np.asarray(given[name], dtype) for name, dtype in _DTYPES.items()}


_OPTIONAL = ("weights", "segment_ids", "positions")


def _check_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    if ids.dtype.kind not in "iu":
        raise InputError(f"{name} of a batch has dtype {ids.dtype}, expected integers")
    low, high = ids.min(), ids.max()
    if low < 0 or high >= vocab_size:
        raise InputError(f"{name} of a batch go from {low} to {high}, the vocabulary has {vocab_size} entries")


def _positions(segment_ids: Tokens) -> Tokens:
    """Returns the positions of tokens in their documents, from 0."""
    index = np.arange(segment_ids.shape[1])
    starts = np.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0
    return index - np.maximum.accumulate(index * starts, axis=1)
