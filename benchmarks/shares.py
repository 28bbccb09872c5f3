"""What each of four processes reads, writes and holds of a model that they convert, load, save and compress together.

    python benchmarks/shares.py [--folder FOLDER] [--out benchmarks/results]

Writes a checkpoint in the form of Mixtral with 16 layers (6.4 GB in bfloat16). Four processes on this machine, one
device each, convert it, load it over a mesh of all and save it again, as a training run does at its end, and write it
with its experts in 4 bits. A quarter of the model, as it is or as it becomes, is a process's share. Memory is the peak
of a step, beyond what the process has before it and keeps after it. Everything is removed at the end; meanwhile it
takes four times the size of the checkpoint. OUT receives `shares.json`.
"""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import convert
from evidence.layouts import SHARES
from evidence.results import RESULTS, Figures
from evidence.stamp import ROOT

PROCESSES, LAYERS, GB = 4, 16, 1e9
CONFIG = convert.CONFIG | {
    "hidden_size": 2048,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
MESHES = ({"fsdp": 4}, {"tensor": 4})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to use; default: temporary files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--process", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        _steps(options.process)
        return
    figures = Figures("shares", options.out, writes=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="moe-jax-benchmark-") as name:
        convert.write_checkpoint(Path(name) / "foreign", LAYERS, CONFIG)
        figures.put_rows(SHARES.name, rows(_run_all(Path(name))))
    print(SHARES.text(figures))


def rows(found: list[dict[str, Any]]) -> list[list[Any]]:
    """The table; of every step the process that reads, writes or needs the most."""
    share, layer = found[0]["share"], found[0]["layer"]
    table = []
    for name in found[0]["steps"]:
        read, written, memory, seconds = (
            max(process["steps"][name][what] for process in found) for what in ("read", "written", "memory", "seconds")
        )
        to_write = found[0]["written"].get(name, share)
        table.append([name, read / GB, read / share, written / GB, written / to_write, memory / layer, seconds])
    return table


def _run_all(folder: Path) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--process", str(folder)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    files = [folder / f"said{index}" for index in range(PROCESSES)]
    started = [
        subprocess.Popen(
            command,
            # Only the first process of a job prints; each says what it found in a file.
            env=environment | {"MOE_JAX_DISTRIBUTED": f"localhost:{port},{PROCESSES},{index}", "SAID": str(file)},
        )
        for index, file in enumerate(files)
    ]
    if any([process.wait() for process in started]):
        raise SystemExit("a process failed")
    return [json.loads(file.read_text()) for file in files]


def _steps(folder: Path) -> None:
    """What one process does."""
    from moe_jax.distributed.processes import join_processes, leave_processes

    join_processes()
    import jax
    from flax import nnx

    from moe_jax.compression import compress, make_method
    from moe_jax.conversion import convert as convert_model
    from moe_jax.distributed.sharding import make_mesh
    from moe_jax.model_io.loading import load_model, model_leaves
    from moe_jax.model_io.model_dir import ModelDirectory, ModelDirectoryWriter

    steps: dict[str, Any] = {}
    with _Step(steps, "convert"):
        convert_model(folder / "foreign", folder / "model")
    source = ModelDirectory(folder / "model")
    sizes = {path: math.prod(spec.shape) * spec.dtype.itemsize for path, spec in source.specs().items()}
    for axes in MESHES:
        mesh = ", ".join(f"{axis} {size}" for axis, size in axes.items())
        with _Step(steps, f"load, {mesh}"):
            model = load_model(source, mesh=make_mesh(axes))
            jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        with (
            _Step(steps, f"save, {mesh}"),
            ModelDirectoryWriter(folder / mesh, model.config, tokenizer_files=[], lineage=[]) as writer,
        ):
            for path, leaf in model_leaves(model):
                writer.write_sharded(path, leaf, leaf.dtype)
        del model
    with _Step(steps, "compress to 4 bits"):
        compress(source, folder / "small", make_method("quantize", {"bits": 4}), described={"bits": 4})
    small = ModelDirectory(folder / "small")
    written = {"compress to 4 bits": sum(map(small.stored_bytes, small.specs())) / PROCESSES}
    layer = sum(size for path, size in sizes.items() if path.startswith("layers/0/"))
    said = {"steps": steps, "share": sum(sizes.values()) / PROCESSES, "written": written, "layer": layer}
    Path(os.environ["SAID"]).write_text(json.dumps(said))
    leave_processes()


class _Step:
    """Measures what a block reads and writes, and its memory; all processes begin it together."""

    def __init__(self, steps: dict[str, Any], name: str):
        self._steps, self._name = steps, name

    def __enter__(self) -> None:
        from moe_jax.distributed.processes import wait_for_all
        from moe_jax.files import regular_files

        wait_for_all(f"begin {self._name}")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
        self._held, self._traffic, self._start = _memory("VmRSS"), regular_files.traffic_so_far(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        from moe_jax.distributed.processes import wait_for_all
        from moe_jax.files import regular_files

        moved, peak = regular_files.traffic_so_far() - self._traffic, _memory("VmHWM")
        wait_for_all(f"end {self._name}")
        self._steps[self._name] = {
            "read": moved.read,
            "written": moved.written,
            "memory": max(0, peak - max(self._held, _memory("VmRSS"))),
            "seconds": time.perf_counter() - self._start,
        }


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


if __name__ == "__main__":
    main()
