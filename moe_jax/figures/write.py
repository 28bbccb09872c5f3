"""Writes a folder of plots with their numbers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from moe_jax.figures.plots import plot_between, plot_load, plot_to_base
from moe_jax.figures.similarity import LayerSimilarity
from moe_jax.files.resume import staged_directory
from moe_jax.files.storage_path import as_path

TO_BASE, BETWEEN, LOAD, NUMBERS = "cosine_to_base.png", "cosine_between_experts.png", "expert_load.png", "figures.json"


def write_figures(
    dst: Path,
    layers: Sequence[LayerSimilarity],
    *,
    name: str,
    shares: Mapping[int, Float[np.ndarray, " E"]] | None = None,
    text: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Writes the plots and `figures.json`, all or nothing.

    Args:
      dst: the folder to make.
      layers: similarities of experts; empty if they cannot be compared, and then there are no plots of them.
      name: of the model, for the titles.
      shares: by layer index, the share of the assignments per expert; None: no plot of it.
      text: the text on which they were measured: `path`, `tokens` and `seq_len`.

    Returns:
      The files.

    Raises:
      InputError: if there is anything at `dst`.
    """
    dst = Path(dst)
    with staged_directory(dst) as folder:
        files = []
        if layers:
            plot_to_base(layers, folder / TO_BASE, title=name)
            plot_between(layers, folder / BETWEEN, title=name)
            files += [TO_BASE, BETWEEN]
        if shares is not None and text is not None:
            title = f"{name}: load of the experts, {text['tokens']:,} tokens of {Path(text['path']).name}"
            plot_load(shares, folder / LOAD, title=title)
            files.append(LOAD)
        numbers = {
            "model": name,
            "text": None if text is None else dict(text),
            "layers": [_numbers(layer, None if shares is None else shares[layer.layer]) for layer in layers]
            or [{"layer": layer, "load": share.tolist()} for layer, share in (shares or {}).items()],
        }
        as_path(folder / NUMBERS).write_durably(json.dumps(numbers, indent=1).encode())
    return [dst / file for file in (*files, NUMBERS)]


def _numbers(layer: LayerSimilarity, share: Float[np.ndarray, " E"] | None) -> dict[str, Any]:
    every = layer.all_to_base()
    return {
        "layer": layer.layer,
        "base": layer.base,
        "last_expert_is_universal": layer.universal,
        "cosine_to_base": {
            "mean": float(every.mean()),
            "least": float(every.min()),
            "greatest": float(every.max()),
            "whole_expert": layer.whole_to_base.tolist(),
            **{name: values.tolist() for name, values in layer.to_base.items()},
        },
        "cosine_between_experts": layer.between.tolist(),
        "load": None if share is None else share.tolist(),
    }
