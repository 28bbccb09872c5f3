"""Makes a larger MoE of an MoE, leaf by leaf: experts become several (`copied_experts` says which, and what it keeps).

Komatsuzaki et al. 2022 (arXiv:2212.05055) copy the FFN of a dense model; here the experts themselves are copied.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from moe_jax.checks.step0 import Probe
from moe_jax.core.draws import COPIED, NOISE, stream
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.processes import check_equal, first_decides
from moe_jax.model_io.in_memory import Destination, open_writer, write_each
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_source import ModelSource
from moe_jax.models import ModelConfig, config_to_json
from moe_jax.models.moe_config import ROUTER_LEAVES_BY_EXPERT
from moe_jax.upcycling.copied_experts import (
    factor_of_selection_bias,
    larger_config,
    numbers_of_copies,
    origins,
    relative_router_noise,
    why_different,
)
from moe_jax.upcycling.expert_leaves import MATRICES, with_noise
from moe_jax.upcycling.outcome import Specs, Upcycled, measured_of, sizes_of
from moe_jax.upcycling.spec import UpcycleSpec


def make_larger(
    source: ModelSource,
    dst: Destination,
    spec: UpcycleSpec,
    *,
    demand: Mapping[int, Float[np.ndarray, " E"]] | None = None,
    progress: Progress = no_progress,
) -> Upcycled:
    """Makes a larger MoE of an MoE; arguments and errors as of `upcycle`. One leaf is in memory at a time."""
    config = larger_config(source.config, spec)
    if (demand is None) != (spec.copies_by == "even"):
        raise InputError(f"copies_by={spec.copies_by!r} and demand go together: measure_demand gives it")
    counts = {
        i: numbers_of_copies(
            None if demand is None else demand[i], source.config.moe(i).num_experts, config.moe(i).num_experts
        )
        for i in source.config.moe_layers
    }
    copies = {i: tuple(map(int, each)) for i, each in counts.items()}
    specs, differs = _specs(source, config), why_different(source.config, config, spec)
    described = _described(config, spec) | (
        {} if demand is None else {"copies": {str(i): c for i, c in copies.items()}}
    )
    lineage = [*source.lineage, first_decides(lambda: new_lineage_entry("upcycle", described, [source]))]
    check_equal({"the options": {name: str(value) for name, value in described.items()}})
    check_equal({"the new model": config_to_json(config)})
    writer = open_writer(
        dst,
        config,
        tokenizer_files=source.tokenizer_files,
        lineage=lineage,
        resume=True,
        allow_nonfinite=spec.allow_nonfinite,
    )
    probe: Probe | None = None

    def make_probe() -> None:
        nonlocal probe
        probe = Probe(source, config, specs, spec.seed, allow_nonfinite=spec.allow_nonfinite)

    if spec.step0_check:
        first_decides(make_probe)
    result = Upcycled(config, *sizes_of(source, config, specs), differs=differs, copies=copies)
    with writer:
        originals = {i: origins(each) for i, each in counts.items()}

        def leaf(path: str) -> np.ndarray:
            return _leaf(path, source, config, originals, spec)

        write_each(writer, writer.expected, leaf, doing="copying experts", progress=progress)
        if spec.step0_check:
            written = writer.read_back()

            def compare() -> None:
                nonlocal result
                assert probe is not None
                found = probe.compare(written.read, progress, may_differ=differs is not None)
                result = result._replace(**found._asdict())

            first_decides(compare)
        writer.lineage[-1]["measured"] = measured_of(result)
    return result


def _described(config: ModelConfig, spec: UpcycleSpec) -> dict[str, Any]:
    """Returns the options for the lineage."""
    moe = config.moe(config.moe_layers[0])
    described = {
        "experts": moe.num_experts,
        "top_k": moe.top_k,
        "copies_by": spec.copies_by,
        "router_noise": relative_router_noise(spec),
        "noise": spec.noise,
        "shared_from": spec.shared_from,
        "seed": spec.seed,
        "step0_check": spec.step0_check,
        "allow_nonfinite": spec.allow_nonfinite,
    }
    return described if spec.text is None else described | {"text": str(spec.text)}


def _specs(source: ModelSource, config: ModelConfig) -> Specs:
    """Returns the shapes and dtypes of the leaves: those of the source, and of new leaves those of the experts.

    Biases of selection are float32, whatever they were, so that no rounding makes another choice of a scaled one.
    """
    stored = source.specs()

    def dtype(path: str) -> np.dtype:
        if path.endswith("/router/selection_bias"):
            return np.dtype(np.float32)
        return stored[path if path in stored else path.replace("/universal/", "/experts/")].dtype

    return {path: jax.ShapeDtypeStruct(spec.shape, dtype(path)) for path, spec in leaf_specs(config).items()}


def _leaf(
    path: str,
    source: ModelSource,
    config: ModelConfig,
    originals: Mapping[int, Int[np.ndarray, " M"]],
    spec: UpcycleSpec,
) -> np.ndarray:
    """Returns a leaf of the larger MoE."""
    where, _, below = path.partition("/mlp/")
    layer = int(where.split("/")[1]) if below else -1
    if layer not in originals:
        return source.read(path)
    of = originals[layer]
    if below.startswith("universal/") and path not in source.specs():
        experts = source.read(path.replace("/universal/", "/experts/"))
        return np.mean(experts, axis=0, dtype=np.float32).astype(experts.dtype)
    if below in ROUTER_LEAVES_BY_EXPERT:
        leaf = source.read(path)
        copied = np.ascontiguousarray(leaf[..., of])
        if below == "router/selection_bias":
            factor = factor_of_selection_bias(source.config.moe(layer), config.moe(layer))
            return copied.astype(np.float32) * np.float32(factor)
        is_noisy = below == "router/kernel" and relative_router_noise(spec) > 0
        return _noisy_columns(copied, leaf, spec, layer) if is_noisy else copied
    if _is_of_each_expert(path, source, config):
        leaf, moe = source.read(path), source.config.moe(layer)
        # A universal FFN that is in the bank is the last one there, and stays the last.
        copied = leaf[np.append(of, np.arange(moe.num_experts, moe.bank_experts))]
        is_noisy = spec.noise > 0 and below.endswith("/kernel")
        return _noisy_copies(copied, below.split("/")[1], moe.num_experts, spec, layer) if is_noisy else copied
    return source.read(path)


def _is_of_each_expert(path: str, source: ModelSource, config: ModelConfig) -> bool:
    """Whether a leaf of an MoE's bank has a part for every expert, on its first axis; others are copied as they are."""
    if "/mlp/experts/" not in path:
        return False
    before, after = (leaf_specs(of)[path].shape for of in (source.config, config))
    if before == after:
        return False
    moe = source.config.moe(int(path.split("/")[1]))
    if before[0] != moe.bank_experts or before[1:] != after[1:]:
        raise InputError(f"{path} has the shape {before}, from which no expert can be copied; export the model first")
    return True


def _noisy_columns(
    copied: Float[np.ndarray, "d M"], first: Float[np.ndarray, "d N"], spec: UpcycleSpec, layer: int
) -> Float[np.ndarray, "d M"]:
    """Returns a router's kernel with noise on all columns but the first N, which are those that there were."""
    count, made = first.shape[1], copied.astype(np.float32)
    deviation = np.std(first.astype(np.float64))
    noise = stream(spec.seed, layer, COPIED).standard_normal(made[:, count:].shape, np.float32)
    made[:, count:] += np.float32(relative_router_noise(spec) * deviation) * noise
    return made.astype(copied.dtype)


def _noisy_copies(
    copied: Float[np.ndarray, "M i o"], name: str, count: int, spec: UpcycleSpec, layer: int
) -> Float[np.ndarray, "M i o"]:
    """Returns kernels with noise on all experts but the first N, which are those that there were."""
    for expert in range(count, len(copied)):
        random = stream(spec.seed, layer, NOISE, MATRICES.index(name), expert)
        copied[expert] = with_noise(copied[expert].astype(np.float32), spec.noise, random).astype(copied.dtype)
    return copied
