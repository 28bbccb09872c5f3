"""Memory and speed of `moe-jax convert` and `moe-jax export` against `cp` on the same disk.

    python benchmarks/convert.py [--folder FOLDER] [--layers 2] [--out benchmarks/results]

Writes a checkpoint with the shapes of Mixtral-8x7B but few layers (two: 6.2 GB) in bfloat16, copies it with `cp`,
converts it, exports the result, and compares what came back with what went in. Then it converts the same model as a
checkpoint in FP8, with a scale for 128 x 128 numbers, to bfloat16. Each command is a process of its own, begins with
nothing of its input in the page cache, and is timed until all it wrote is on the disk. Everything is
removed at the end; meanwhile it takes four times the size of the checkpoint. OUT receives `convert.json`.

Asked for: peak resident memory of at most 1.5 GB + 2 x the largest parameter of a layer, and half the speed of `cp`.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from evidence.layouts import CONVERT
from evidence.results import RESULTS, Figures
from moe_jax.conversion import read_hf_config
from moe_jax.conversion.families import family_named
from moe_jax.conversion.hugging_face_dir import open_checkpoint
from moe_jax.conversion.safetensors_file import DiskShards, PlannedTensor
from moe_jax.conversion.table import PER_EXPERT, apply_table
from moe_jax.conversion.tensors import STORED_DTYPES as DTYPES
from moe_jax.conversion.tensors import TensorEntry, TensorFiles
from moe_jax.model_io.loading import leaf_specs

GB = 1e9
RUN = 16 << 20  # elements that are written or compared at a time
BLOCK = 128
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: temporary files")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("convert", options.out, writes=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="moe-jax-benchmark-") as name:
        figures.put_rows(CONVERT.name, measure(Path(name), options.layers))
    print(CONVERT.text(figures))


def measure(folder: Path, layers: int) -> list[list]:
    """Runs the comparison in `folder`; returns the rows of the table."""
    foreign, copy, ours, back = (folder / name for name in ("foreign", "copy", "ours", "back"))
    largest = write_checkpoint(foreign, layers)
    size = sum(file.stat().st_size for file in foreign.iterdir())
    bound = 1.5 * GB + 2 * largest
    print(f"checkpoint {size / GB:.2f} GB, largest parameter of a layer {largest / GB:.2f} GB", flush=True)
    rows: list[list] = []

    def cp() -> float:
        seconds, _ = timed(["cp", "-r", str(foreign), str(copy)], foreign)
        shutil.rmtree(copy)
        rows.append(["`cp`", size / GB / seconds, None, None, None])
        return seconds

    before = cp()
    for command, source, target in (("convert", foreign, ours), ("export", ours, back)):
        seconds, peak = timed([sys.executable, "-m", "moe_jax.commands.cli", command, str(source), str(target)], source)
        after = cp()  # disks and neighbours change their minds: each command stands between two copies
        ratio = (before + after) / 2 / seconds
        rows.insert(-1, [f"`moe-jax {command}`", size / GB / seconds, ratio, peak / GB, bound / GB])
        before = after
    print("bit for bit the same after convert and export:", same_tensors(foreign, back), flush=True)
    for made in (ours, back):
        shutil.rmtree(made)
    quantised = folder / "quantised"
    write_checkpoint(quantised, layers, CONFIG | {"quantization_config": FP8}, fp8=True)
    command = ["convert", str(quantised), str(ours), "--dtype", "bfloat16"]
    seconds, peak = timed([sys.executable, "-m", "moe_jax.commands.cli", *command], quantised)
    ratio = (before + cp()) / 2 / seconds
    rows.insert(-1, ["`moe-jax convert`, from FP8", size / GB / seconds, ratio, peak / GB, bound / GB])
    return rows


def write_checkpoint(folder: Path, layers: int, config: dict[str, Any] = CONFIG, *, fp8: bool = False) -> int:
    """Writes a checkpoint of random bits; returns the bytes of the largest leaf of a layer in bfloat16."""
    folder.mkdir()
    keys = {**config, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(keys))
    leaves = leaf_specs(read_hf_config(keys))
    mapped = apply_table(family_named("mixtral").table, leaves, layers, PER_EXPERT, "mixtral", num_encoder_layers=0)
    tensors = {}
    for name, shape in mapped.tensors.items():
        if fp8 and len(shape) == 2 and "model.layers" in name:
            tensors[name] = PlannedTensor("F8_E4M3", shape)
            tensors[f"{name}_scale_inv"] = PlannedTensor("F32", tuple(math.ceil(size / BLOCK) for size in shape))
        else:
            tensors[name] = PlannedTensor("BF16", shape)
    # Without the highest bit of the exponent, numbers are below 2 and finite.
    bits = np.random.default_rng(0).integers(0, 1 << 16, 2 * RUN, np.uint16) & np.uint16(0xBFFF)
    with DiskShards(folder, tensors, int(5 * GB)) as writer:
        for index, (name, tensor) in enumerate(tensors.items()):
            shift = index * 7919 % RUN  # so that no two tensors are equal
            count = math.prod(tensor.shape)
            for start in range(0, count, RUN):
                run = bits[shift : shift + min(RUN, count - start)]
                if tensor.dtype == "F8_E4M3":  # without the lowest bit: none is NaN
                    writer.write(name, start, (run & 0xFE).astype(np.uint8).view(DTYPES[tensor.dtype]))
                else:
                    writer.write(name, start, run.view(DTYPES["BF16"]).astype(DTYPES[tensor.dtype]))
    return max(math.prod(leaf.shape) * 2 for path, leaf in leaves.items() if path.startswith("layers/"))


def timed(command: list[str], source: Path) -> tuple[float, int]:
    """Seconds until a command is done and all it wrote is on the disk, and its peak resident memory in bytes."""
    os.sync()
    for file in source.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stderr=subprocess.PIPE, text=True)
    output = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{output}")
    os.sync()
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def same_tensors(a: Path, b: Path) -> bool:
    """Whether two checkpoints hold the same bits under the same names."""
    first, second, files = open_checkpoint(a).tensors, open_checkpoint(b).tensors, TensorFiles()

    def runs(entry: TensorEntry):
        count = math.prod(entry.shape)
        for start in range(0, count, RUN):
            out = np.empty(min(RUN, count - start), np.uint16)
            files.read_into(entry, start, out)
            yield out

    return first.keys() == second.keys() and all(
        entry.shape == second[name].shape
        and entry.dtype == second[name].dtype
        and all(np.array_equal(x, y) for x, y in zip(runs(entry), runs(second[name]), strict=True))
        for name, entry in first.items()
    )


if __name__ == "__main__":
    main()
