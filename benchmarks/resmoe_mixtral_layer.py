"""One layer of Mixtral-8x7B's true shape through `moe-jax compress --method resmoe`: time, memory, bytes, errors.

    python benchmarks/resmoe_mixtral_layer.py [--dtype bfloat16] [--noise 0.5] [--folder DIR] [--out benchmarks/results]
        [-- OPTIONS]

8 experts of 14336 neurons, design width 12 288. The layer is synthetic: a common expert, to which each adds noise
of its own (`--noise`: its norm in parts of the common one's) and an order of its own of the neurons. What the objective
is in the right orders is known, and compared with what is found. The layer is written to the disk as a model directory
(5.6 GB in float32) and compressed by the command itself in another process, whose greatest resident memory is reported.
OPTIONS go to the command, by default --keep 0.25 with the refit. Aim: under 40 minutes on 2 cores, at most 16 GB.
OUT receives `resmoe_mixtral_layer.json`.
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

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import ml_dtypes
import numpy as np

from evidence.layouts import MIXTRAL_LAYER
from evidence.results import RESULTS, Figures
from moe_jax.loading import leaf_specs
from moe_jax.model_dir import ModelDirectoryWriter
from moe_jax.models import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig

D_MODEL, NEURONS, EXPERTS = 4096, 14336, 8
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def layer_config(dtype: str) -> ModelConfig:
    """A model that is little else than the layer."""
    moe = MoEConfig(expert=FFNConfig(dim=NEURONS), num_experts=EXPERTS, top_k=2)
    attention = AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128)
    layer = LayerConfig(attention=attention, mlp=moe)
    return ModelConfig(
        family="mixtral", vocab_size=64, d_model=D_MODEL, max_positions=1024, layers=(layer,), dtype=dtype
    )


def write_layer(folder: Path, dtype: str, noise: float, orders: np.ndarray) -> None:
    """Writes the model: one kernel of all experts at a time."""
    config = layer_config(dtype)
    with ModelDirectoryWriter(folder, config, tokenizer_files=(), lineage=[]) as writer:
        for index, (path, spec) in enumerate(leaf_specs(config).items()):
            random = np.random.Generator(np.random.SFC64([index, 7]))
            if "/experts/" not in path:
                writer.write({path: np.ones(spec.shape, DTYPES[dtype])})
                continue
            down = "/down/" in path
            common = random.standard_normal(spec.shape[1:], dtype=np.float32) / np.float32(D_MODEL**0.5)
            kernels = np.empty(spec.shape, DTYPES[dtype])
            for expert, order in enumerate(orders):
                own = random.standard_normal(common.shape, dtype=np.float32) * np.float32(noise / D_MODEL**0.5)
                own += common
                kernels[expert] = own[order] if down else own[:, order]
            writer.write({path: kernels})


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


def expected_objective(noise: float) -> float:
    """Of the right orders, on average: E - 1 of the E parts of the noise that are not common to all experts."""
    entries = NEURONS * 3 * D_MODEL
    return entries * noise**2 / D_MODEL * (EXPERTS - 1) / EXPERTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--noise", type=float, default=0.5)
    parser.add_argument("--folder", type=Path, help="for the models, 10 GB; a temporary one by default")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("options", nargs="*", help="of moe-jax compress")
    options = parser.parse_args()
    figures = Figures("resmoe_mixtral_layer", options.out, writes=True)
    orders = np.stack([np.random.default_rng(expert).permutation(NEURONS) for expert in range(EXPERTS)])
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        began = time.monotonic()
        write_layer(folder / "layer", options.dtype, options.noise, orders)
        seconds = time.monotonic() - began
        print(f"wrote a layer of {options.dtype}, noise {options.noise:g}: {seconds:.0f} s", flush=True)
        command = [sys.executable, "-m", "moe_jax.cli", "compress", folder / "layer", folder / "out"]
        command += ["--method", "resmoe", *(options.options or ["--keep", "0.25"]), "--json"]
        began = time.monotonic()
        process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
        peak = peak_memory(process)
        printed = process.communicate()[0]
        if process.returncode:
            raise SystemExit(process.returncode)
        seconds = time.monotonic() - began
        layer = json.loads(printed.splitlines()[0])
        print(json.dumps(layer, indent=2))
        rows = [
            ["minutes", round(seconds / 60, 1), 40],
            ["greatest resident memory, GB", round(max(peak) / 1e9, 2), 16],
            ["rounds of alignment until it converged", layer["rounds"] if layer["converged"] else None, None],
            [
                "objective, in parts of what the planted orders give",
                round(layer["objective"] / expected_objective(options.noise), 4),
                1,
            ],
            ["experts on the disk before, GB", round(layer["bytes_before"] / 1e9, 2), None],
            ["experts on the disk after, GB", round(layer["bytes_after"] / 1e9, 2), None],
        ]
        figures.put_rows(MIXTRAL_LAYER.name, rows)
        print(MIXTRAL_LAYER.text(figures))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
