"""Compresses the trained vanilla models in every way, and scores what comes out."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ders.results import Results
from ders.settings import BASES, METHODS, NO_DELTAS
from ders.training import Task
from moe_jax.compress import Method, make_method
from moe_jax.loading import load_model
from moe_jax.model_dir import ModelDirectory
from moe_jax.model_source import ModelSource
from moe_jax.nn import Decoder
from moe_jax.sharding import path_name
from quality.compression import compressed
from quality.scoring import Scorer

# Losses of one model differ by rounding alone.
_SAME = 1e-5


def compress_models(task: Task, results: Results) -> None:
    """Does the compressions that are not in the results yet. The trained vanilla models must be there."""
    score = Scorer(task.held_out, task.settings.seq_len)
    for seed in task.seeds:
        # Not the loss of the training table, whose models may be others than those in the folder now.
        loss = score(load_model(ModelDirectory(task.vanilla(seed))))
        there = results.get("compressed", str(seed))
        if there is None:
            results.put("compressed", str(seed), value={"loss": loss})
        elif abs(there["loss"] - loss) > _SAME:
            raise SystemExit(
                f"the vanilla model of seed {seed} in the folder of models has held-out loss {loss:.6f}, that of the "
                f"results had {there['loss']:.6f}: compress all again with --compress-again"
            )
    jobs = [
        (name, value, base, seed)
        for name, values in METHODS.items()
        for value in values
        # Seeds outside the bases: what is kept by chance has another size for every seed, but not for every base.
        for seed in task.seeds
        for base in BASES
        if results.get("compression", base, name, value, str(seed)) is None
    ]
    print(f"compression: {len(jobs)} models to make", flush=True)
    for number, (name, value, base, seed) in enumerate(jobs, start=1):
        source = ModelDirectory(task.vanilla(seed))
        dense = task.dense if base == BASES[0] else None
        if name == NO_DELTAS:
            result = {"loss": score(without_deltas(source, dense))}
        else:
            result = _compressed(source, dense, _method(name, value, seed), score)
        result["added_loss"] = result["loss"] - results.get("compressed", str(seed))["loss"]
        results.put("compression", base, name, value, str(seed), value=result)
        print(
            f"[{number}/{len(jobs)}] {name} {value}, base {base}, seed {seed}: held-out loss {result['loss']:.4f} "
            f"({result['added_loss']:+.4f})",
            flush=True,
        )


def _method(name: str, value: str, seed: int) -> Method:
    if name == "bits":
        return make_method("ders-quantize", {"bits": int(value)})
    keep = "magnitude" if name == "drop, largest kept" else "random"
    return make_method("ders-sparsify", {"drop": float(value), "keep": keep, "seed": seed})


def _compressed(source: ModelSource, dense: ModelSource | None, method: Method, score: Scorer) -> dict[str, Any]:
    """What is kept of one compressed model, which is scored from what was written."""
    with compressed(source, method, base=dense) as (model, report):
        loss = score(load_model(model))
    return {
        "loss": loss,
        "expert_bytes_before": report.expert_bytes_before,
        "expert_bytes_after": report.expert_bytes_after,
        "cosine_mean": [layer.cosine_mean for layer in report.layers],
        "cosine_min": [layer.cosine_min for layer in report.layers],
        "relative_error": [layer.relative_error for layer in report.layers],
        "delta_error": [layer.delta_error for layer in report.layers],
    }


def without_deltas(source: ModelSource, dense: ModelSource | None) -> Decoder:
    """The model with every expert replaced by the base: how much there is to lose at most."""
    model = load_model(source)
    graphdef, state = nnx.split(model)
    bases = {} if dense is None else dict(_leaves(nnx.state(load_model(dense))))

    def replaced(path: tuple, leaf: jax.Array) -> jax.Array:
        name = path_name(path)
        if "/experts/" not in name:
            return leaf
        # Stacked over layers and experts: [L, E, in, out].
        base = bases[name.replace("/experts/", "/")][:, None] if bases else jnp.mean(leaf, axis=1, keepdims=True)
        return jnp.broadcast_to(base, leaf.shape)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(replaced, state))


def _leaves(state: nnx.State) -> Iterable[tuple[str, jax.Array]]:
    return ((path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state))
