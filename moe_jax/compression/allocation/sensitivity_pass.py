"""Measures the sensitivity of a model to each matrix of the experts of each layer: divergence per error.

One matrix of the experts of one layer at a time is coded in a few bits, as it may be later. The divergence KL(p || q)
of the model's predictions from the original ones is divided by the error of that matrix's outputs. Small divergences
nearly add up.

All matrices are tried in one pass: the model runs over a few windows, together with a copy of these for every matrix
that was tried before. So every layer is read once, and memory holds one layer and the activations of all copies.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from moe_jax.checks.streamed_layers import EMBEDDING, embed_tokens, output_logits
from moe_jax.compression.calibration.layerwise_pass import PlacedLayer, apply_in_batches
from moe_jax.compression.calibration.recorded import LayerCalibration
from moe_jax.compression.coding.expert_coders import expert_coders
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.core.errors import InputError
from moe_jax.core.finite import cast
from moe_jax.core.formatting import show_bytes
from moe_jax.core.memory import available_memory
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models.config import ModelConfig

TRIED_BITS, TRIED_GROUP_SIZE = 3, 128
_MOST_TOKENS = 2048


def measure_sensitivities(
    source: ModelSource,
    windows: Int[np.ndarray, "N L"],
    calibration: Callable[[int], LayerCalibration],
    *,
    mesh: Mesh,
    batch_size: int = 8,
    progress: Progress = no_progress,
) -> dict[int, dict[str, float]]:
    """Returns the divergence, nats per token, per unit of `output_error(...)`; by layer index and name of the matrix.

    Args:
      source: a model whose MoE layers have full experts.
      windows: of the calibration text; the first 2048 tokens are enough.
      calibration: of every MoE layer.
      mesh: as for `layerwise_pass.record`.
      batch_size: windows at a time.
      progress: called after every layer.

    Raises:
      InputError: if experts are not full, a divergence is not finite, or there is no room in memory.
    """
    config = source.config
    check_full_experts(config)
    windows = windows[: max(1, _MOST_TOKENS // windows.shape[1])]
    count = sum(len(config.moe(i).expert.matrices) for i in config.moe_layers)
    needed = 2 * 4 * windows.size * config.d_model * (1 + count)
    available = available_memory()
    if available is not None and needed > available:
        raise InputError(
            f"measuring how much depends on each layer takes {show_bytes(needed)} of memory, {show_bytes(available)} "
            "are free; give a smaller --seq-len"
        )
    embedding = {path: source.read(path) for path in source.specs() if path.startswith("embed/")}
    whole = np.asarray(embed_tokens(config, embedding, windows))
    copies: dict[tuple[int, str], np.ndarray] = {}
    errors: dict[tuple[int, str], float] = {}
    programs: dict = {}
    with jax.set_mesh(mesh):
        for i in range(config.num_layers):
            progress("measuring what depends on layers", i, config.num_layers)
            layer = PlacedLayer(source, i, mesh, programs)
            after = {tried: apply_in_batches(layer, copy, batch_size, mesh) for tried, copy in copies.items()}
            if layer.moe:
                source_layer = SourceLayer(source, i, calibration=calibration(i))
                for name in source_layer.shapes:
                    coded, errors[i, name] = _coded(source_layer, name)
                    leaves = {f"mlp/experts/{name}/kernel": coded}
                    after[i, name] = apply_in_batches(layer.with_leaves(leaves), whole, batch_size, mesh)
            whole, copies = apply_in_batches(layer, whole, batch_size, mesh), after
    progress("measuring what depends on layers", config.num_layers, config.num_layers)
    last = {path: source.read(path) for path in source.specs() if path.startswith(("final_norm/", "lm_head/"))}
    if config.tie_embeddings:
        last[EMBEDDING] = embedding[EMBEDDING]
    divergence_from = _divergence_from(config, last, whole)
    found: dict[int, dict[str, float]] = {i: {} for i in config.moe_layers}
    for (i, name), copy in copies.items():
        divergence = divergence_from(copy)
        if not np.isfinite(divergence):
            raise InputError(f"calibration: what the model says is not finite once {name} of layer {i} is coded")
        found[i][name] = max(divergence, 0.0) / max(errors[i, name], float(np.finfo(np.float32).tiny))
    return found


def check_full_experts(config: ModelConfig) -> None:
    """Raises `InputError` for a model that `measure_sensitivities` cannot measure."""
    for i in config.moe_layers:
        bank = config.moe(i).bank
        if bank.form.over_base:
            raise InputError(
                f"layer {i}: how much depends on it can only be measured of full experts, and it has {bank.kind} ones; "
                "write the model with moe-jax export, and compress that"
            )


def output_error(error: float, norm: float) -> float:
    """Returns the squared relative error of a matrix's outputs."""
    return error / norm if norm > 0 else 0.0


def _coded(layer: SourceLayer, name: str) -> tuple[Float[np.ndarray, "E i o"], float]:
    """Returns the kernels of a matrix in codes, and the error of their outputs."""
    stacked, error, norm = [], 0.0, 0.0
    for kernel, coder in zip(layer.kernels(name), expert_coders(layer, name), strict=True):
        wide = kernel.astype(np.float32)
        made = coder.quantize(wide, bits=TRIED_BITS, group_size=TRIED_GROUP_SIZE).approximation
        difference, moment = made - wide, coder.moment
        assert moment is not None
        error += float(np.sum(difference * (moment @ difference), dtype=np.float64))
        norm += float(np.sum(wide * (moment @ wide), dtype=np.float64))
        stacked.append(cast(f"the {name} kernels of layer {layer.index}", made, kernel.dtype))
    return np.stack(stacked), output_error(error, norm)


def _divergence_from(
    config: ModelConfig, last: Mapping[str, np.ndarray], before: Float[np.ndarray, "N L d"]
) -> Callable[[Float[np.ndarray, "N L d"]], float]:
    """Returns a function of activations: KL(p || q) per token, p from `before` and q from these activations."""

    @jax.jit
    def of_window(leaves, one, other):
        p, q = (jax.nn.log_softmax(output_logits(config, leaves, x[None])[0].astype(jnp.float32)) for x in (one, other))
        return jnp.mean(jnp.sum(jnp.exp(p) * (p - q), axis=1))

    placed = jax.tree.map(jnp.asarray, dict(last))
    # Numbers one by one: if an interrupt comes while NumPy waits for arrays of JAX, NumPy raises another error.
    return lambda after: float(np.mean([float(of_window(placed, *pair)) for pair in zip(before, after, strict=True)]))
