"""MoE layers of true shapes through `moe-jax compress --method resmoe`, from the files to the files.

    python benchmarks/true_layers.py [--layers NAME ...] [--exact] [--folder DIR] [--out benchmarks/results]
        [-- OPTIONS]

One layer each of Mixtral-8x7B (8 experts of 14336 neurons, width 4096), DeepSeekMoE-16B (64 of 1408, width 2048) and
Qwen3-30B-A3B (128 of 768, width 2048), bfloat16. The weights are synthetic, twice:

- planted: a common expert, to which each adds noise of half its norm and an order of its own of the neurons;
- independent: experts that have nothing in common, so that no order is plain and nothing can be proven early.

A layer is written to the disk as a model directory and compressed by the command itself in another process, whose
greatest resident memory is reported; it needs 10 GB of disk. OPTIONS go to the command, by default --keep 0.25 with the
refit. Aims on 2 cores: Mixtral 5 minutes and 8 GB, DeepSeekMoE 2 minutes, an objective within 0.1 % of the exact one.

Of planted layers the least objective is that of the planted orders. For independent ones `--exact` makes the alignment
again with exact searches among all pairs in float64 (annealed where that is the default for small clouds), which takes
minutes each, but not of Mixtral's whole layer, for which a round is expected to take half an hour or more.

OUT receives `true_layers.json`, row by row; rows that are there are not measured again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import ml_dtypes
import numpy as np

from evidence.layouts import TRUE_EXACT, TRUE_LAYERS
from evidence.results import RESULTS, Figures
from moe_jax.compression.alignment import matching
from moe_jax.compression.alignment.barycenter import free_support_barycenter
from moe_jax.compression.source_layer import SourceLayer, design_matrices
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_dir import ModelDirectory, ModelDirectoryWriter
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig

NOISE = 0.5
# Of the exact searches: the last rounds gain some 0.01 % of the objective in all.
EXACT_ROUNDS = 12


class Shape(NamedTuple):
    """Of a layer: its experts, their neurons, the width of the model, and the minutes and GB aimed at."""

    experts: int
    neurons: int
    d_model: int
    minutes: float | None = None
    memory: float | None = None


LAYERS = {
    "Mixtral-8x7B": Shape(8, 14336, 4096, 5, 8),
    "DeepSeekMoE-16B": Shape(64, 1408, 2048, 2),
    "Qwen3-30B-A3B": Shape(128, 768, 2048),
}
# Where the exact searches end within the hour.
EXACT = {
    "Mixtral-8x7B, an eighth of its neurons and width": Shape(8, 1792, 512),
    "DeepSeekMoE-16B": LAYERS["DeepSeekMoE-16B"],
    "Qwen3-30B-A3B": LAYERS["Qwen3-30B-A3B"],
}


def layer_config(shape: Shape) -> ModelConfig:
    """A model that is little else than the layer."""
    moe = MoEConfig(expert=FFNConfig(dim=shape.neurons), num_experts=shape.experts, top_k=2)
    layer = LayerConfig(attention=AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=128), mlp=moe)
    return ModelConfig(
        family="mixtral",
        vocab_size=64,
        d_model=shape.d_model,
        max_positions=1024,
        layers=(layer,),
        dtype="bfloat16",
    )


def write_layer(folder: Path, shape: Shape, *, planted: bool) -> None:
    """Writes the model: one kernel of all experts at a time."""
    config = layer_config(shape)
    orders = [np.random.default_rng(expert).permutation(shape.neurons) for expert in range(shape.experts)]
    with ModelDirectoryWriter(folder, config, tokenizer_files=(), lineage=[]) as writer:
        for index, (path, spec) in enumerate(leaf_specs(config).items()):
            random = np.random.Generator(np.random.SFC64([index, 7]))
            if "/experts/" not in path:
                writer.write({path: np.ones(spec.shape, ml_dtypes.bfloat16)})
                continue
            scale = np.float32(shape.d_model**-0.5)
            common = random.standard_normal(spec.shape[1:], dtype=np.float32) * scale
            kernels = np.empty(spec.shape, ml_dtypes.bfloat16)
            for expert, order in enumerate(orders):
                own = random.standard_normal(common.shape, dtype=np.float32) * scale
                if planted:
                    own = common + np.float32(NOISE) * own
                kernels[expert] = own[order] if "/down/" in path else own[:, order]
            writer.write({path: kernels})


def planted_objective(shape: Shape) -> float:
    """Of the right orders, on average: E - 1 of the E parts of the noise that are not common to all experts."""
    entries = shape.neurons * 3 * shape.d_model
    return entries * NOISE**2 / shape.d_model * (shape.experts - 1) / shape.experts


def peak_memory(process: subprocess.Popen) -> list[int]:
    """A list whose last number is the greatest resident memory of a process so far, in bytes."""
    seen = [0]

    def watch() -> None:
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            seen.extend(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
            time.sleep(0.5)

    threading.Thread(target=watch, daemon=True).start()
    return seen


def measure(name: str, shape: Shape, folder: Path, options: list[str], *, planted: bool) -> list:
    """A row: one layer through the command."""
    write_layer(folder / "layer", shape, planted=planted)
    command = [sys.executable, "-m", "moe_jax.commands.cli", "compress", folder / "layer", folder / "out"]
    command += ["--method", "resmoe", *(options or ["--keep", "0.25"]), "--json"]
    began = time.monotonic()
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    peak = peak_memory(process)
    printed = process.communicate()[0]
    seconds = time.monotonic() - began
    if process.returncode:
        raise SystemExit(process.returncode)
    layer = json.loads(printed.splitlines()[0])
    print(json.dumps(layer, indent=2), flush=True)
    return [
        name,
        "planted" if planted else "independent",
        seconds / 60,
        shape.minutes,
        max(peak) / 1e9,
        shape.memory,
        layer["rounds"],
        layer["objective"] / planted_objective(shape) - 1 if planted else None,
    ]


def compare(name: str, shape: Shape, folder: Path) -> list:
    """A row: independent experts of one shape aligned as large clouds are, and by searches among all pairs."""
    write_layer(folder / "layer", shape, planted=False)
    designs = design_matrices(SourceLayer(ModelDirectory(folder / "layer"), 0))
    found, seconds = [], []
    small_up_to = matching._SMALL_ROUND
    for most, rounds in ((0, None), (np.inf, EXACT_ROUNDS)):
        matching._SMALL_ROUND = most
        began = time.monotonic()
        found.append(free_support_barycenter(designs, max_rounds=rounds, solver="assignment"))
        seconds.append(time.monotonic() - began)
    matching._SMALL_ROUND = small_up_to
    mine, exact = found
    return [
        name,
        mine.objective[-1] / exact.objective[-1] - 1,
        seconds[0] / 60,
        mine.rounds,
        seconds[1] / 60,
        exact.rounds,
        mine.duality_gap,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--exact", action="store_true", help="compare with exact searches instead")
    parser.add_argument("--folder", type=Path, help="for the models, 10 GB; a temporary one by default")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("options", nargs="*", help="of moe-jax compress")
    options = parser.parse_args()
    figures = Figures("true_layers", options.out, writes=True)
    table = TRUE_EXACT if options.exact else TRUE_LAYERS
    cases = [(name, shape, False) for name, shape in EXACT.items() if name.split(",")[0] in options.layers]
    if not options.exact:
        cases = [(name, LAYERS[name], planted) for name in options.layers for planted in (True, False)]
    for name, shape, planted in cases:
        key = f"{name}, {'planted' if planted else 'independent'}"
        if figures.get("rows", table.name, key) is not None:
            continue
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            if options.exact:
                row = compare(name, shape, folder)
            else:
                row = measure(name, shape, folder, options.options, planted=planted)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        figures.put_row(table.name, key, row)
        print(table.text(figures), flush=True)


if __name__ == "__main__":
    main()
