"""Models in codes by llama.cpp and llm-compressor, from files that this library exports."""

import ctypes
import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from evidence.whole_models.task import RefusedError, Task, group_size
from moe_jax.conversion.gguf.gguf_types import FILE_TYPES
from moe_jax.conversion.gguf.imatrix import read_imatrix

WORKER = Path(__file__).resolve().parents[1] / "llm_compressor_worker.py"
_QUIET = "Q4_K_M"  # of the file that an importance matrix is measured with


def k_quant(task: Task, target: Path, kind: str, *, draw: int | None) -> str:
    """Has llama.cpp quantise the GGUF file of a model.

    Args:
      task: the model.
      target: the file to write.
      kind: the mix of types, such as `Q4_K_M`.
      draw: of the text whose importance matrix it is given; None: it is given none.

    Returns:
      The version of what did it.
    """
    import llama_cpp

    llama_cpp.llama_log_set(_silent(), ctypes.c_void_p(0))
    given = llama_cpp.llama_model_quantize_default_params()
    given.ftype = FILE_TYPES[kind]
    kept = {} if draw is None else _importance(task, draw)
    if kept:
        Entry = llama_cpp.llama_cpp.llama_model_imatrix_data
        numbers = ctypes.POINTER(ctypes.c_float)
        rows = [Entry(name.encode(), values.ctypes.data_as(numbers), values.size) for name, values in kept.items()]
        given.imatrix = (Entry * (len(rows) + 1))(*rows)  # an entry without a name ends it
    if llama_cpp.llama_model_quantize(str(task.gguf).encode(), str(target).encode(), ctypes.byref(given)):
        raise RefusedError(f"llama.cpp did not make {kind}")
    return f"llama-cpp-python {llama_cpp.__version__}"


@cache
def _silent() -> Any:
    """What llama.cpp says goes nowhere; kept, for it is called later."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda *said: None)


def _importance(task: Task, draw: int) -> dict[str, np.ndarray]:
    """Float32[experts, in] of every matrix, measured by `export` on the text to calibrate with."""
    from gguf import GGUFReader

    file, sizes = task.work / f"imatrix-{draw}.gguf", task.sizes
    if not file.exists():
        beside = task.work / f"measured-{draw}.gguf"
        beside.unlink(missing_ok=True)
        task.command(
            *("export", task.model, beside, "--format", "gguf", "--gguf-type", _QUIET),
            *("--calibrate", task.text, "--samples", sizes.samples, "--seq-len", sizes.seq_len),
            *("--calibration-seed", draw, "--save-imatrix", file),
        )
        beside.unlink()
    shapes = {tensor.name: tuple(map(int, tensor.shape[::-1])) for tensor in GGUFReader(task.gguf).tensors}
    return {name: np.ascontiguousarray(values, np.float32) for name, values in read_imatrix(file, shapes).items()}


def llm_compressor(task: Task, target: Path, method: str, *, draw: int) -> str:
    """Has llm-compressor put all linear layers but the head and routers in codes of 4 bits.

    Args:
      task: the model.
      target: the folder to write.
      method: `gptq`, with symmetric codes, or `awq`, with zero points: as each is usually asked for.
      draw: of the windows to calibrate with.

    Returns:
      The versions of what did it, and the size of groups.
    """
    if task.llmc is None:
        raise RefusedError("--llmc names no Python with llm-compressor")
    size = group_size(task)
    asked = {"windows": task.calibration_windows(draw).tolist(), "group_size": size, "method": method}
    ours = ("PYTHONPATH", "JAX_PLATFORMS")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(task.llmc), str(WORKER), str(task.checkpoint), str(target)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise RefusedError(f"llm-compressor failed: {' '.join(last)[:300]}")
    (answer,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"versions"'))
    return ", ".join([*(f"{name} {found}" for name, found in answer["versions"].items()), f"groups of {size}"])
