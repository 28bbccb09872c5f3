"""How far the predictions of a model move if one part of it after another is changed, all in one pass over a text.

Small divergences nearly add up. The model runs over a few windows, together with a copy of these for every part that
was changed before. So every layer is read once, and memory holds one layer and the activations of all copies.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from moe_jax.checks.streamed_layers import head_leaves, output_logits
from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.compression.calibration.embedded_rows import embedded_rows
from moe_jax.compression.calibration.placed_layer import PlacedLayer, apply_in_batches, batches_of
from moe_jax.core.data_sheets import available_memory
from moe_jax.core.errors import InputError
from moe_jax.core.formatting import show_bytes
from moe_jax.core.terminal import Progress
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models.config import ModelConfig

MOST_TOKENS = 1024
"""So many tokens of a text are enough: an allocation changes in second order with how much depends on its parts."""
# For the estimate of the time left: the predictions of a copy take about as many products as so many layers of SmolLM2.
_PASSES_OF_PREDICTIONS = 6

TryLayer = Callable[[PlacedLayer, Float[np.ndarray, "N L d"]], Iterator[tuple[str, PlacedLayer]]]
"""Yields a layer changed in one way after another, by names, given it as it is, and what it is given."""


def few_rows(rows: CalibrationRows) -> CalibrationRows:
    """Returns the first rows of a text, with about `MOST_TOKENS` tokens."""
    return rows.first(max(1, MOST_TOKENS // rows.length))


def divergences(
    source: ModelSource,
    rows: CalibrationRows,
    try_layer: TryLayer,
    counts: Sequence[int],
    *,
    embedding: ModelSource | None = None,
    heads: Mapping[str, ModelSource] | None = None,
    mesh: Mesh,
    batch_size: int,
    progress: Progress,
) -> dict[tuple[int, str], float]:
    """Returns KL(p || q) in nats per token, p being what the model predicts, q with one part changed.

    Args:
      source: the model.
      rows: of the text, a few; see `few_rows`.
      try_layer: changes a layer.
      counts: of the changes of every layer.
      embedding: the model with another embedding, which is (-1, "embed").
      heads: the model with another head, by names; an `embed` among them is a head, too, of the change before.
      mesh: devices that share the rows of a batch.
      batch_size: rows computed at a time.
      progress: called all the time, in layers.

    Raises:
      InputError: if a divergence is not finite, or there is no room in memory.
    """
    config, heads = source.config, heads or {}
    count = sum(counts) + (embedding is not None)
    needed = 2 * 4 * rows.tokens.size * config.d_model * (1 + count)
    available = available_memory()
    if available is not None and needed > available:
        raise InputError(
            f"measuring how much depends on each layer takes {show_bytes(needed)} of memory, {show_bytes(available)} "
            "are free; give a smaller --seq-len"
        )
    size, batches = batches_of(len(rows), batch_size, mesh)
    whole = np.concatenate([x for _, x in embedded_rows(source, rows, batches, size, mesh=mesh)])
    copies: dict[tuple[int, str], np.ndarray] = {}
    if embedding is not None:
        copies[-1, "embed"] = np.concatenate([x for _, x in embedded_rows(embedding, rows, batches, size, mesh=mesh)])
    programs: dict = {}
    # Each layer is applied to one copy for every change so far, so that late layers take longer; predictions come last.
    passes = sum(1 + len(copies) + sum(counts[: i + 1]) for i in range(config.num_layers))
    total, passed = passes + (count + len(heads)) * _PASSES_OF_PREDICTIONS, 0.0

    def advance(by: float = 1) -> None:
        nonlocal passed
        passed = min(passed + by, total)
        progress("measuring what depends on layers", config.num_layers * passed / total, config.num_layers)

    advance(0)
    with jax.set_mesh(mesh):
        for i in range(config.num_layers):
            layer, after = PlacedLayer(source, i, mesh, programs), {}
            for tried, copy in copies.items():
                after[tried] = apply_in_batches(layer, copy, batch_size, mesh, rows.valid)
                advance()
            for name, changed in try_layer(layer, whole):
                after[i, name] = apply_in_batches(changed, whole, batch_size, mesh, rows.valid)
                advance()
            whole, copies = apply_in_batches(layer, whole, batch_size, mesh, rows.valid), after
            advance()
    ends: dict[tuple[int, str], tuple[np.ndarray, ModelSource]] = {key: (x, source) for key, x in copies.items()}
    for name, other in heads.items():
        ends[-1, name] = copies.get((-1, name), whole), other
    advance_one = partial(advance, (count + len(heads)) * _PASSES_OF_PREDICTIONS / max(1, len(ends) * len(whole)))
    found = _divergences(source, whole, ends, rows.predicting, advance_one)
    progress("measuring what depends on layers", config.num_layers, config.num_layers)
    for (i, name), divergence in found.items():
        if not np.isfinite(divergence):
            where = "" if i < 0 else f" of layer {i}"
            raise InputError(f"calibration: what the model says is not finite once {name}{where} is coded")
    return {key: max(divergence, 0.0) for key, divergence in found.items()}


def _divergences(
    source: ModelSource,
    before: Float[np.ndarray, "N L d"],
    tried: Mapping[tuple[int, str], tuple[Float[np.ndarray, "N L d"], ModelSource]],
    counted: Bool[np.ndarray, "N L"],
    advance: Callable[[], object],
) -> dict[tuple[int, str], float]:
    """Returns KL(p || q) per counted token, p from the activations `before`, q from each of those tried, and its head.

    Memory holds the predictions of one window.
    """

    @partial(jax.jit, static_argnums=0)
    def predictions(config: ModelConfig, leaves: Any, x: Any) -> Any:
        return jax.nn.log_softmax(output_logits(config, leaves, x[None])[0].astype(jnp.float32))

    @partial(jax.jit, static_argnums=0)
    def of_window(config: ModelConfig, leaves: Any, p: Any, other: Any, counted: Any) -> Any:
        return jnp.mean(jnp.sum(jnp.exp(p) * (p - predictions(config, leaves, other)), axis=1), where=counted)

    def placed(model: ModelSource) -> dict[str, Any]:
        return {path: jnp.asarray(model.read(path)) for path in head_leaves(model.config, model.specs())}

    models = {id(model): model for model in (source, *(model for _, model in tried.values()))}
    leaves = {number: placed(model) for number, model in models.items()}
    found = {key: np.zeros(len(before)) for key in tried}
    for n, window in enumerate(before):
        p = predictions(source.config, leaves[id(source)], window)
        for key, (activations, model) in tried.items():
            # Numbers one by one: if an interrupt comes while NumPy waits for arrays of JAX, NumPy raises another error.
            found[key][n] = float(of_window(model.config, leaves[id(model)], p, activations[n], counted[n]))
            advance()
    weights = counted.sum(axis=1)
    return {key: float(np.average(own, weights=weights)) for key, own in found.items()}
