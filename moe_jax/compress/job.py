"""Trained MoE -> smaller MoE, on disk, layer by layer."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.checkpoint import LeafReader
from moe_jax.compress.base import Base, check_base
from moe_jax.compress.figures import LayerFigures
from moe_jax.compress.methods import Method
from moe_jax.compress.report import LayerReport, Report
from moe_jax.compress.source_layer import SourceLayer
from moe_jax.errors import InputError
from moe_jax.loading import check_leaves, leaf_specs
from moe_jax.model_dir import ModelDirectoryWriter, new_lineage_entry, read_lineage
from moe_jax.model_source import ModelSource
from moe_jax.models import ModelConfig
from moe_jax.staging import refuse_existing

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how much of it is done: `progress("compressing", 3, 32)`."""


def compress(
    source: ModelSource,
    dst: Path,
    method: Method,
    *,
    base: ModelSource | None = None,
    extended: bool = False,
    layers: Iterable[int] | None = None,
    described: Mapping[str, Any],
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Writes a model with its experts compressed. Memory holds one layer at a time.

    A job that was killed goes on where it was when it is started again with the same options.

    Args:
      source: a model with MoE layers, whatever their banks.
      dst: the model directory to write.
      method: what to do.
      base: the dense model that the experts came from. Without it, a bank's own base, or the mean of the experts.
      extended: the universal FFN beside each bank becomes one more of its deltas.
      layers: the MoE layers to compress; None: all. The others stay as they are.
      described: the options as the user gave them: for the lineage, and to know the job again.
      progress: called after every layer.

    Raises:
      InputError: if the model has no experts, an option does not go with it, weights are not finite, or `dst` exists.
        Nothing is left behind.
      OSError: if the disk is full. What is done stays beside `dst`, to be gone on with.
    """
    refuse_existing(dst)
    indices = choose_layers(source.config, layers)
    if base is not None:
        check_base(base.config, source.config, indices)
        check_leaves(leaf_specs(base.config), base.specs(), str(base.path))
    check_leaves(leaf_specs(source.config), source.specs(), str(source.path))
    if extended:
        _check_universal(source.config, indices)
    chosen = {i: SourceLayer(source, i, with_universal=source.config.layers[i].mlp.universal_beside and extended)
              for i in indices}  # fmt: skip
    config = _compressed_config(source.config, method, chosen)
    entry = new_lineage_entry("compress", described, [source] if base is None else [source, base])
    writer = ModelDirectoryWriter(
        dst,
        config,
        tokenizer_files=source.tokenizer_files,
        lineage=[*read_lineage(source.path), entry],
        resume=True,
    )
    with writer:
        bases = {i: Base(layer, base) for i, layer in chosen.items()}
        figures = _write(source, config, method, chosen, bases, writer, progress)
        written = writer.read_back()
        report = _report(source, written, bases, figures)
        writer.lineage[-1]["measured"] = report.to_json()
    return report


def choose_layers(config: ModelConfig, layers: Iterable[int] | None) -> tuple[int, ...]:
    """The layers to compress, ascending.

    Raises:
      InputError: if the model has no experts, or a layer is not one of its MoE layers; all are listed.
    """
    if not config.moe_layers:
        raise InputError("the model is dense: it has no experts to compress; moe-jax upcycle makes an MoE of it")
    if layers is None:
        return config.moe_layers
    chosen = sorted(set(layers))
    others = ", ".join(str(i) for i in chosen if i not in config.moe_layers)
    if others or not chosen:
        known = ", ".join(map(str, config.moe_layers))
        raise InputError(f"--layers: {others or 'none'} of the model's MoE layers, which are {known}")
    return tuple(chosen)


def _check_universal(config: ModelConfig, layers: Iterable[int]) -> None:
    without = [i for i in layers if config.layers[i].mlp.universal == "none"]
    if without:
        some = ", ".join(map(str, without[:4])) + (", ..." if len(without) > 4 else "")
        raise InputError(f"--extended: there is no universal FFN in layers {some}; leave it out")


def _compressed_config(config: ModelConfig, method: Method, chosen: Mapping[int, SourceLayer]) -> ModelConfig:
    planned = method.plan(tuple(chosen.values()))
    layers = list(config.layers)
    for i, moe in planned.items():
        layers[i] = dataclasses.replace(layers[i], mlp=moe)
    return dataclasses.replace(config, layers=tuple(layers))


def _write(
    source: ModelSource,
    config: ModelConfig,
    method: Method,
    chosen: Mapping[int, SourceLayer],
    bases: Mapping[int, Base],
    writer: ModelDirectoryWriter,
    progress: Progress,
) -> dict[int, LayerFigures]:
    """Writes all leaves that are not on the disk yet, and returns the figures of every compressed layer."""
    stored = source.specs()
    by_layer: dict[str, list[str]] = {}
    for path in leaf_specs(config):
        by_layer.setdefault(path.split("/")[1] if path.startswith("layers/") else "", []).append(path)
    figures = {int(i): LayerFigures(**noted) for i, noted in writer.notes().items()}
    for path in by_layer.pop(""):
        _put(writer, path, source.read)
    for done, (layer, paths) in enumerate(by_layer.items(), start=1):
        i = int(layer)
        made: set[str] = set()
        if i in chosen and not (i in figures and writer.done.issuperset(paths)):
            prefix = f"layers/{i}/mlp/"

            def write(below: str, leaf: np.ndarray, prefix: str = prefix, made: set[str] = made) -> None:
                made.add(prefix + below)
                if prefix + below not in writer.done:
                    writer.write({prefix + below: leaf})

            figures[i] = method.compress(chosen[i], bases[i], config.layers[i].mlp, write)
            writer.note(layer, dataclasses.asdict(figures[i]))
        for path in paths:
            if path in stored and path not in made:
                _put(writer, path, source.read)
        progress("compressing", done, len(by_layer))
    return figures


def _put(writer: ModelDirectoryWriter, path: str, read: Callable[[str], np.ndarray]) -> None:
    if path not in writer.done:
        writer.write({path: read(path)})


def _report(
    source: ModelSource, written: LeafReader, bases: Mapping[int, Base], figures: Mapping[int, LayerFigures]
) -> Report:
    layers = tuple(
        LayerReport(
            layer=i,
            base=base.origin,
            bytes_before=_expert_bytes(source, i),
            bytes_after=_expert_bytes(written, i),
            **dataclasses.asdict(figures[i]),
        )
        for i, base in bases.items()
    )
    return Report(
        layers=layers,
        bytes_before=sum(map(source.stored_bytes, source.specs())),
        bytes_after=sum(map(written.stored_bytes, written.specs)),
    )


def _expert_bytes(model: ModelSource | LeafReader, layer: int) -> int:
    """What a layer's experts and universal FFN take on the disk, wherever that FFN is."""
    specs = model.specs if isinstance(model, LeafReader) else model.specs()
    prefixes = (f"layers/{layer}/mlp/experts/", f"layers/{layer}/mlp/universal/")
    return sum(model.stored_bytes(path) for path in specs if path.startswith(prefixes))
