"""How much codes of linear maps outside the experts change, and how much depends on that (methods.md 5).

*Errors*: every map is coded in every number of bits, on some of its columns, for the second moment of what it is given
on the text. *Sensitivities*: the maps of a group are coded together in a few bits, and the divergence of the model's
predictions is divided by the sum of the errors of their outputs: queries and keys make scores together, values and the
output map what is added, gate and up the hidden activations. An embedding that is also the head is one group.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.compression.calibration.coded_pass import CodedPass
from moe_jax.compression.calibration.divergences import divergences, few_rows
from moe_jax.compression.calibration.placed_layer import PlacedLayer, batches_of
from moe_jax.compression.calibration.sensitivities import TRIED_BITS, output_error, sensitivity_of
from moe_jax.compression.coding.coder import ExpertCoder, LeastError, LeastOutputError
from moe_jax.compression.linear_maps import LinearMap, coded_leaves, head_and_rows, usual_codes
from moe_jax.compression.source_layer import check_weights
from moe_jax.core.terminal import Progress
from moe_jax.files.storage_path import as_path
from moe_jax.model_io.in_memory import SourceWithLeaves
from moe_jax.model_io.model_source import ModelSource

BITS = (2, 3, 4, 8)
"""Numbers of bits that are tried."""
_COLUMNS = 128
_SCORES = ("q", "k", "q_down", "q_up")
Options = Mapping[str, Any]
"""Options of codes beside their bits, as experts have them."""


class MapAnalysis(NamedTuple):
    """Errors and sensitivities of linear maps, in their order.

    Attributes:
      errors: of outputs, relative and squared, for all `BITS`.
      sensitivities: divergence, nats per token, for each unit of such an error.
    """

    errors: Float[np.ndarray, "m b"]
    sensitivities: Float[np.ndarray, " m"]


def analyse_maps(
    source: ModelSource,
    maps: Sequence[LinearMap],
    rows: CalibrationRows,
    folder: Path,
    options: Options,
    *,
    mesh: Mesh,
    progress: Progress,
    batch_size: int = 8,
) -> MapAnalysis:
    """Analyses linear maps on a text; an interrupted analysis goes on. `folder` is of this job alone.

    Raises:
      InputError: if weights or activations are not finite, or there is no room.
    """
    folder.mkdir(exist_ok=True)
    given: Any = {"mesh": mesh, "batch_size": batch_size}
    errors, head = _errors(source, maps, rows, folder, options, progress=progress, **given)
    file = folder / "sensitivities.npy"
    if not file.is_file():
        found = _sensitivities(source, maps, few_rows(rows), head, options, progress=progress, **given)
        with as_path(file).replacing() as place:
            np.save(place, found, allow_pickle=False)
    return MapAnalysis(errors, np.load(file, allow_pickle=False))


def group_of(one: LinearMap) -> str:
    """Returns the name of the group that a map is tried with."""
    folder, _, name = one.below.rpartition("/")
    if one.part == "attention":
        return f"{folder}/scores" if name in _SCORES else f"{folder}/values"
    return f"{folder}/hidden" if name in ("gate", "up") else one.below


def _errors(
    source: ModelSource,
    maps: Sequence[LinearMap],
    rows: CalibrationRows,
    folder: Path,
    options: Options,
    *,
    mesh: Mesh,
    batch_size: int,
    progress: Progress,
) -> tuple[Float[np.ndarray, "m b"], Float[np.ndarray, "d d"]]:
    """Tries all bits on all maps, layer by layer, on what they are given by layers as they are.

    Also returns the second moment of what the head is given.
    """
    work = CodedPass(source, rows, folder, mesh=mesh, batch_size=batch_size)
    layers = source.config.num_layers
    for layer in range(work.next, layers):
        progress("analysing linear maps", layer, layers)
        work.begin(layer)
        own = [one for one in maps if one.layer == layer]
        found = [_errors_of(source, one, LeastOutputError(next(work.moments(one.leaf))), options) for one in own]
        with as_path(folder / f"{layer}.errors.npy").replacing() as place:
            np.save(place, np.array(found).reshape(len(own), len(BITS)), allow_pickle=False)
        work.finish({})
    progress("analysing linear maps", layers, layers)
    by_layer = {layer: iter(np.load(folder / f"{layer}.errors.npy", allow_pickle=False)) for layer in range(layers)}
    head = work.moment_of_head()
    errors = []
    for one in maps:
        if one.layer is not None:
            errors.append(next(by_layer[one.layer]))
        else:
            errors.append(_errors_of(source, one, _coder(source, one, head), options))
    return np.array(errors), head


def _coder(source: ModelSource, one: LinearMap, head: Float[np.ndarray, "d d"]) -> ExpertCoder:
    """Returns the coder of embedding or head, given the second moment of what the head is given."""
    if one.part == "head":
        return LeastOutputError(head)
    return LeastOutputError(head_and_rows(head)) if source.config.tie_embeddings else LeastError()


def _errors_of(source: ModelSource, one: LinearMap, coder: ExpertCoder, options: Options) -> list[float]:
    kernel = _kernel(source, one)
    columns = np.unique(np.linspace(0, kernel.shape[1] - 1, min(kernel.shape[1], _COLUMNS)).astype(int))
    some = np.ascontiguousarray(kernel[:, columns])
    found = []
    for bits in BITS:
        codes = usual_codes(one, bits, options)
        part = one._replace(shape=(kernel.shape[0], len(columns)))
        error = coded_leaves(part, codes, some, coder)[1] - some
        found.append(output_error(_squared(coder, error), _squared(coder, some)))
    return found


def _squared(coder: ExpertCoder, error: Float[np.ndarray, "i o"]) -> float:
    if isinstance(coder, LeastOutputError):
        return coder.squared(error)
    return float(np.sum(np.square(error, dtype=np.float64)))


def _kernel(source: ModelSource, one: LinearMap) -> Float[np.ndarray, "i o"]:
    return np.ascontiguousarray(one.kernel(check_weights(one.leaf, source.read(one.leaf))), np.float32)


def _sensitivities(
    source: ModelSource,
    maps: Sequence[LinearMap],
    rows: CalibrationRows,
    head: Float[np.ndarray, "d d"],
    options: Options,
    *,
    mesh: Mesh,
    batch_size: int,
    progress: Progress,
) -> Float[np.ndarray, " m"]:
    """Codes one group of maps after another, and divides the divergence by their errors."""
    config, errors = source.config, {}
    size, batches = batches_of(len(rows), batch_size, mesh)

    def in_codes(one: LinearMap, coder: ExpertCoder) -> tuple[np.ndarray, float]:
        """Returns the leaf of a map that codes stand for, and their error."""
        kernel = _kernel(source, one)
        made = coded_leaves(one, usual_codes(one, TRIED_BITS, options), kernel, coder)[1]
        return one.kernel(made), output_error(_squared(coder, made - kernel), _squared(coder, kernel))

    def try_layer(layer: PlacedLayer, given: Float[np.ndarray, "N L d"]) -> Iterator[tuple[str, PlacedLayer]]:
        groups: dict[str, list[LinearMap]] = {}
        for one in (one for one in maps if one.layer == layer.index):
            groups.setdefault(group_of(one), []).append(one)
        moments: dict[str, Any] = {}
        for batch in batches if groups else ():
            _, found, _ = layer.moments(given[batch], size, rows.valid[batch])
            moments = {path: moments.get(path, 0) + np.asarray(moment) for path, moment in found.items()}
        for group, members in groups.items():
            changed, total = {}, 0.0
            for one in members:
                leaf, error = in_codes(one, LeastOutputError(moments[f"{one.below}/kernel"]))
                changed[f"{one.below}/kernel"], total = leaf.astype(source.specs()[one.leaf].dtype), total + error
            errors[layer.index, group] = total
            yield group, layer.with_leaves(changed)

    counts = [len({group_of(one) for one in maps if one.layer == layer}) for layer in range(config.num_layers)]
    outer: dict[str, ModelSource] = {}
    for one in (one for one in maps if one.layer is None):
        leaf, errors[-1, one.path] = in_codes(one, _coder(source, one, head))
        outer[one.path] = SourceWithLeaves(source, config, {one.leaf: leaf.astype(source.specs()[one.leaf].dtype)})
    heads = {path: model for path, model in outer.items() if path != "embed" or config.tie_embeddings}
    how: Any = {"mesh": mesh, "batch_size": batch_size, "progress": progress}
    found = divergences(source, rows, try_layer, counts, embedding=outer.get("embed"), heads=heads, **how)
    keys = [(-1 if one.layer is None else one.layer, group_of(one)) for one in maps]
    return np.array([sensitivity_of(found[key], errors[key]) for key in keys])
