"""Trained MoE -> smaller MoE, layer by layer."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.compress.calibration.usage import Calibration
from moe_jax.compress.job.analyses import AnalysisStore
from moe_jax.compress.job.report import LayerReport, Report
from moe_jax.compress.layer_figures import LayerFigures
from moe_jax.compress.methods.delta_base import Base, check_base
from moe_jax.compress.methods.interface import Analysis, Method
from moe_jax.compress.source_layer import SourceLayer, Write
from moe_jax.errors import InputError
from moe_jax.finite import DoesNotFit
from moe_jax.in_memory import Destination, InMemory, ModelWriter, open_writer
from moe_jax.lineage import new_lineage_entry
from moe_jax.loading import check_leaves, leaf_specs
from moe_jax.model_source import ModelSource
from moe_jax.models import LayerConfig, ModelConfig, MoEConfig
from moe_jax.peft.base import is_tuned
from moe_jax.peft.over_base import StoredLeaves
from moe_jax.remote.remote_path import BucketPath
from moe_jax.staging import check_target
from moe_jax.terminal import Progress, no_progress

OnLayer = Callable[[int, LayerFigures, int], None]
"""Called with a layer that is done, its figures, and the bytes of its experts now."""


def compress(
    source: ModelSource,
    dst: Destination,
    method: Method,
    *,
    base: ModelSource | None = None,
    extended: bool = False,
    layers: Iterable[int] | None = None,
    statistics: Calibration | None = None,
    described: Mapping[str, Any],
    progress: Progress = no_progress,
    on_layer: OnLayer = lambda layer, figures, nbytes: None,
) -> Report:
    """Writes a model with its experts compressed. Memory holds one layer at a time.

    A job that was killed goes on where it was when it is started again with the same options.

    Args:
      source: a model with MoE layers, whatever their banks.
      dst: the model directory to write, or memory.
      method: what to do.
      base: the dense model that the experts came from. Without it, a bank's own base, or the mean of the experts.
      extended: the universal FFN beside each bank becomes one more of its deltas.
      layers: the MoE layers to compress; None: all. The others stay as they are.
      statistics: of the routers on a text; None: methods that use them take all experts to be used alike.
      described: the options as the user gave them: for the lineage, and to know the job again.
      progress: called at the start and after every layer to compress.
      on_layer: called for every compressed layer in turn, also for those that a killed job had done.

    Raises:
      InputError: if the model has no experts, an option does not go with it, weights are not finite, or `dst` exists.
        Nothing is left behind.
      OSError: if the disk is full. What is done stays beside `dst`, to be gone on with.
    """
    if isinstance(dst, Path):
        check_target(dst, buckets=True)
    indices = choose_layers(source.config, layers)
    if extended:
        _check_universal(source.config, indices)
    if base is not None:
        check_base(base.config, source.config, indices)
        check_leaves(leaf_specs(base.config), base.specs(), str(base.path))
    check_leaves(leaf_specs(source.config), source.specs(), str(source.path))
    if method.origin is not None and base is not None:
        raise InputError(f"--base does not go with this method: it takes the {method.origin}")

    def open_layer(i: int) -> SourceLayer:  # anew every time: it keeps what it read last
        universal = extended and source.config.moe(i).universal_beside
        return SourceLayer(source, i, with_universal=universal, statistics=statistics and statistics.layers[i])

    method.check([open_layer(i) for i in indices])
    read = [source, *([base] if base is not None else []), *([statistics.text] if statistics is not None else [])]
    entry = new_lineage_entry("compress", described, read)
    job = {name: entry[name] for name in ("options", "sources")}
    # Not in a bucket: there they are made again.
    on_disk = None if isinstance(dst, InMemory | BucketPath) else dst
    with contextlib.nullcontext() if on_disk is None else AnalysisStore(on_disk, job) as store:
        analyses = _analyse(method, open_layer, indices, store, progress)
        planned = method.plan([open_layer(i) for i in indices], analyses)
        config = dataclasses.replace(source.config, layers=_replaced(source.config.layers, planned))
        writer = open_writer(
            dst,
            config,
            tokenizer_files=source.tokenizer_files,
            lineage=[*source.lineage, entry],
            resume=True,
        )

        def compress_layer(i: int, write: Write) -> LayerFigures:
            layer = open_layer(i)
            try:
                return method.compress(layer, Base(layer, base), config.moe(i), write, analyses[i])
            except DoesNotFit as error:
                raise InputError(f"layer {i}: {error}, for the whole model, with moe-jax convert --dtype") from None

        with writer:
            figures = _write(source, config, indices, compress_layer, writer, progress, on_layer)
            written = writer.read_back()
            origins = {i: method.origin or Base(open_layer(i), base).origin for i in indices}
            report = _report(source, written, origins, figures)
            writer.lineage[-1]["measured"] = report.to_json()
    return report


def _analyse(
    method: Method,
    open_layer: Callable[[int], SourceLayer],
    indices: Sequence[int],
    store: AnalysisStore | None,
    progress: Progress,
) -> dict[int, Analysis]:
    analyses: dict[int, Analysis] = {}
    if type(method).analyse is not Method.analyse:
        progress("analysing", 0, len(indices))
    for done, i in enumerate(indices, start=1):
        known = None if store is None else store.get(i)

        def tick(share: float, done: int = done) -> None:
            progress("analysing", done - 1 + share, len(indices))

        analyses[i] = method.analyse(open_layer(i), tick) if known is None else known
        if store is not None and known is None and analyses[i]:
            store.put(i, analyses[i])
        if analyses[i]:
            progress("analysing", done, len(indices))
    return analyses


def choose_layers(config: ModelConfig, layers: Iterable[int] | None) -> tuple[int, ...]:
    """The layers to compress, ascending.

    Raises:
      InputError: if the model has no experts, or adapters, or a layer is not one of its MoE layers; all are listed.
    """
    if not config.moe_layers:
        raise InputError("the model is dense: it has no experts to compress; moe-jax upcycle makes an MoE of it")
    if is_tuned(config):
        raise InputError("the model has adapters, LoRA or NF4 kernels: compress its base, and adapt what comes out")
    if layers is None:
        return config.moe_layers
    chosen = sorted(set(layers))
    others = ", ".join(str(i) for i in chosen if i not in config.moe_layers)
    if others or not chosen:
        known = ", ".join(map(str, config.moe_layers))
        raise InputError(f"--layers: {others or 'none'} of the model's MoE layers, which are {known}")
    return tuple(chosen)


def _check_universal(config: ModelConfig, layers: Iterable[int]) -> None:
    without = [i for i in layers if config.moe(i).universal == "none"]
    if without:
        some = ", ".join(map(str, without[:4])) + (", ..." if len(without) > 4 else "")
        raise InputError(f"--extended: there is no universal FFN in layers {some}; leave it out, or choose --layers")
    for i in layers:
        moe = config.moe(i)
        if moe.universal_ffn != moe.expert:
            raise InputError(
                f"--extended: the universal FFN of layer {i} is {moe.universal_ffn.dim} wide and its experts "
                f"{moe.expert.dim}, so that they cannot share a base; leave it out, or choose --layers"
            )


def _replaced(layers: tuple[LayerConfig, ...], planned: Mapping[int, MoEConfig]) -> tuple[LayerConfig, ...]:
    return tuple(
        dataclasses.replace(layer, mlp=planned[i]) if i in planned else layer for i, layer in enumerate(layers)
    )


def _write(
    source: ModelSource,
    config: ModelConfig,
    indices: Sequence[int],
    compress_layer: Callable[[int, Write], LayerFigures],
    writer: ModelWriter,
    progress: Progress,
    on_layer: OnLayer,
) -> dict[int, LayerFigures]:
    """Writes all leaves that are not on the disk yet, and returns the figures of every compressed layer."""
    stored = source.specs()
    by_layer: dict[int, list[str]] = {}
    for path in leaf_specs(config):
        by_layer.setdefault(int(path.split("/")[1]) if path.startswith("layers/") else -1, []).append(path)
    notes = writer.notes()
    figures = {int(i): LayerFigures.from_note(noted["figures"]) for i, noted in notes.items()}
    nbytes = {int(i): noted["nbytes"] for i, noted in notes.items()}
    progress("compressing", 0, len(indices))
    for i, paths in by_layer.items():
        made: set[str] = set()
        size = 0
        # Figures are noted before the last leaves of a layer are on the disk, or after: both have to be there.
        if i in indices and not (i in figures and writer.done.issuperset(paths)):

            def write(below: str, leaf: np.ndarray, i: int = i, made: set[str] = made) -> None:
                nonlocal size
                path = f"layers/{i}/mlp/{below}"
                made.add(path)
                size += leaf.nbytes
                if path not in writer.done:
                    writer.write({path: leaf})

            figures[i], nbytes[i] = compress_layer(i, write), size
            writer.note(str(i), {"figures": dataclasses.asdict(figures[i]), "nbytes": size})
        for path in paths:
            if path in stored and path not in made and path not in writer.done:
                writer.write({path: source.read(path)})
        if i in indices:
            on_layer(i, figures[i], nbytes[i])
            progress("compressing", indices.index(i) + 1, len(indices))
    return figures


def _report(
    source: ModelSource, written: StoredLeaves, origins: Mapping[int, str], figures: Mapping[int, LayerFigures]
) -> Report:
    layers = tuple(
        LayerReport(
            layer=i,
            base=origin,
            bytes_before=_expert_bytes(source.specs(), source.stored_bytes, i),
            bytes_after=_expert_bytes(written.specs, written.stored_bytes, i),
            **dataclasses.asdict(figures[i]),
        )
        for i, origin in origins.items()
    )
    return Report(
        layers=layers,
        bytes_before=sum(map(source.stored_bytes, source.specs())),
        bytes_after=sum(map(written.stored_bytes, written.specs)),
    )


def _expert_bytes(paths: Iterable[str], stored_bytes: Callable[[str], int], layer: int) -> int:
    """What a layer's experts and universal FFN take, wherever that FFN is."""
    prefixes = (f"layers/{layer}/mlp/experts/", f"layers/{layer}/mlp/universal/")
    return sum(stored_bytes(path) for path in paths if path.startswith(prefixes))
