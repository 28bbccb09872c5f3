"""A Mixture-of-Experts in about 4 bits, as this library, llm-compressor and llama.cpp make it, read by one evaluator.

    python benchmarks/four_bits.py DATA MODEL --llmc PYTHON --work WORK [--steps 60] [--out benchmarks/results]

MODEL is SmolLM2-135M, DATA the folder of texts that `claims.py` describes. The model is upcycled, 4 experts in every
layer, top-2, and trained for so many steps of 4 x 256 tokens on the mixture of three domains; WORK keeps it and what is
made of it, and what is there is not made again. PYTHON is that of an environment with llm-compressor (`pip install
llmcompressor`); it and this library calibrate with the same 96 windows of 256 tokens, of texts to train on. It takes
the package llama-cpp-python, which is built from source. All files are then read and scored by this library, in
float32: on windows of texts that nothing was trained or calibrated with, and by greedy continuations. OUT receives
`four_bits.json`.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moe_jax
from evidence.layouts import FOUR_BITS
from evidence.results import RESULTS, Figures
from evidence.studies.corpus import Corpus, write_whole
from evidence.studies.jobs import Place
from evidence.studies.scales import SMOLLM
from evidence.studies.texts import DOMAINS, read_text
from evidence.studies.verdicts import effect
from moe_jax.commands.environment import ask_for_huge_pages, keep_compiled_programs
from moe_jax.compression.calibration.recording import sample_windows
from moe_jax.conversion.gguf.gguf_types import FILE_TYPES
from moe_jax.conversion.gguf.imatrix import read_imatrix

EXPERTS, TOP_K, LENGTH, BATCH = 4, 2, 256, 4
CALIBRATED, CHARACTERS, GROUP = 96, 100_000, 64
WINDOWS, PROMPTS, PROMPT, NEW_TOKENS = 16, 8, 32, 32  # windows and prompts of each domain
WHOLE = "bfloat16"
IMATRIX = "imatrix.gguf"  # what the calibrated file was made with
WORKER = Path(__file__).parent / "evidence" / "llm_compressor_worker.py"


class Task(NamedTuple):
    """What all entries are made of.

    Attributes:
      folder, gguf: the model, in bfloat16 and in F16.
      text: to calibrate with.
      windows: drawn from it as the library's own commands draw them.
      python: of the environment with llm-compressor.
    """

    folder: Path
    gguf: Path
    text: Path
    windows: np.ndarray
    python: Path


class Answers(NamedTuple):
    """What a model says: losses [n] of windows, its most likely tokens [n, L - 1], and continuations [prompts, new]."""

    losses: np.ndarray
    tokens: np.ndarray
    continued: np.ndarray


def rounded(task: Task, target: Path) -> str:
    moe_jax.export(task.folder, target, format="compressed-tensors", parts="model", bits=4, group_size=GROUP)
    return ""


def calibrated(task: Task, target: Path) -> str:
    moe_jax.export(
        task.folder,
        target,
        format="compressed-tensors",
        parts="model",
        bits=4,
        group_size=GROUP,
        calibrate=task.text,
        samples=CALIBRATED,
        seq_len=LENGTH,
    )
    return ""


def gptq(task: Task, target: Path) -> str:
    request = json.dumps({"windows": task.windows.tolist(), "group_size": GROUP})
    ours = ("PYTHONPATH", "JAX_PLATFORMS")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(task.python), str(WORKER), str(task.folder), str(target)],
        input=request,
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise SystemExit(f"llm-compressor failed:\n{(done.stdout + done.stderr)[-4000:]}")
    (answer,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"versions"'))
    return ", ".join(f"{name} {found}" for name, found in answer["versions"].items())


def k_quants(task: Task, target: Path) -> str:
    moe_jax.export(task.gguf, target, format="gguf", gguf_type="Q4_K_M")
    return ""


def calibrated_k_quants(task: Task, target: Path) -> str:
    text = {"calibrate": task.text, "samples": CALIBRATED, "seq_len": LENGTH}
    imatrix = target.with_name(IMATRIX)
    imatrix.unlink(missing_ok=True)
    moe_jax.export(task.gguf, target, format="gguf", gguf_type="Q4_K_M", save_imatrix=imatrix, **text)
    return ""


def llama_cpp(task: Task, target: Path) -> str:
    return llama_quantized(task.gguf, target, {})


def llama_cpp_by_importance(task: Task, target: Path) -> str:
    from gguf import GGUFReader

    shapes = {tensor.name: tuple(map(int, tensor.shape[::-1])) for tensor in GGUFReader(task.gguf).tensors}
    return llama_quantized(task.gguf, target, read_imatrix(target.with_name(IMATRIX), shapes))


def llama_quantized(gguf: Path, target: Path, importance: Mapping[str, np.ndarray]) -> str:
    """Has llama.cpp make Q4_K_M; `importance` is that of inputs, Float32[experts, in], by the name of the tensor."""
    import llama_cpp

    given = llama_cpp.llama_model_quantize_default_params()
    given.ftype = FILE_TYPES["Q4_K_M"]
    kept = {name: np.ascontiguousarray(values, np.float32) for name, values in importance.items()}
    if kept:
        Entry = llama_cpp.llama_cpp.llama_model_imatrix_data
        numbers = ctypes.POINTER(ctypes.c_float)
        rows = [Entry(name.encode(), values.ctypes.data_as(numbers), values.size) for name, values in kept.items()]
        given.imatrix = (Entry * (len(rows) + 1))(*rows)  # an entry without a name ends it
    if llama_cpp.llama_model_quantize(str(gguf).encode(), str(target).encode(), ctypes.byref(given)):
        raise SystemExit(f"llama.cpp did not quantise {gguf}")
    return f"llama-cpp-python {llama_cpp.__version__}"


ENTRIES: dict[str, tuple[str, Callable[[Task, Path], str]]] = {
    "compressed-tensors, rounded": ("rounded", rounded),
    "compressed-tensors, calibrated": ("calibrated", calibrated),
    "compressed-tensors, GPTQ of llm-compressor": ("gptq", gptq),
    "Q4_K_M": ("ours.gguf", k_quants),
    "Q4_K_M, calibrated": ("calibrated.gguf", calibrated_k_quants),
    "Q4_K_M of llama.cpp": ("theirs.gguf", llama_cpp),
    "Q4_K_M of llama.cpp, by the same importance": ("theirs-calibrated.gguf", llama_cpp_by_importance),
}
"""By label: the name of what is written, and what writes it and says with which version of which tool."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--llmc", type=Path, required=True, metavar="PYTHON", help="of its environment")
    parser.add_argument("--work", type=Path, required=True, help="folder of kept models")
    parser.add_argument("--steps", type=int, default=60, help="of training (default %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("four_bits", options.out, writes=True)
    place = Place(options.data.resolve(), options.work.resolve(), options.model.resolve())
    task = prepared(place, options.steps, options.llmc)
    tokenizer = moe_jax.load(task.folder).tokenizer
    texts = [tokenizer.encode(read_text(name, place.data).test) for name in DOMAINS]
    windows = np.concatenate([sample_windows(ids, seq_len=LENGTH, samples=WINDOWS) for ids in texts])
    prompts = [window[:PROMPT].tolist() for i, window in enumerate(windows) if i % WINDOWS < PROMPTS]
    whole = answers(task.folder, windows, prompts)
    figures.put_row(FOUR_BITS.name, WHOLE, [WHOLE, size(task.folder), float(whole.losses.mean()), *[None] * 4])
    for label, (name, make) in ENTRIES.items():
        target, note = place.work / name, place.work / f"{name}.txt"
        if not note.exists():
            write_whole(note, make(task, target))
        figures.put_row(
            FOUR_BITS.name, label, row(label, target, whole, answers(target, windows, prompts), note.read_text())
        )
        print(FOUR_BITS.text(figures), flush=True)


def prepared(place: Place, steps: int, python: Path) -> Task:
    """Makes what is not there yet."""
    work, model = place.work, place.smollm
    work.mkdir(parents=True, exist_ok=True)
    assert model is not None
    folder, gguf, text = work / WHOLE, work / "F16.gguf", work / "calibration.txt"
    if not folder.exists():
        moe = moe_jax.upcycle(model, experts=EXPERTS, top_k=TOP_K, every=1)
        scale = dataclasses.replace(SMOLLM, seq_len=LENGTH, batch_size=BATCH)
        batches = Corpus(place, scale, moe.config, model / "tokenizer.json").batches("domains", 0, steps)
        recipe = {
            "train": {"steps": steps},
            "optimizer": {"learning_rate": 1e-4, "weight_decay": 0.0},
            "schedule": {"warmup_steps": SMOLLM.warmup_steps},
        }
        moe_jax.export(moe_jax.train(recipe, moe, batches), folder, dtype="bfloat16")
    if not gguf.exists():
        moe_jax.export(folder, gguf, format="gguf", gguf_type="F16")
    if not text.exists():
        write_whole(text, "\n".join(read_text(name, place.data).train[:CHARACTERS] for name in DOMAINS))
    ids = moe_jax.load(folder).tokenizer.encode(text.read_text("utf-8"))
    return Task(folder, gguf, text, sample_windows(ids, seq_len=LENGTH, samples=CALIBRATED), python)


def answers(path: Path, windows: np.ndarray, prompts: list[list[int]]) -> Answers:
    """What a model says of windows [n, L], and how it goes on with prompts."""
    model = moe_jax.load(path, dtype="float32")
    log_probs = nnx.jit(lambda decoder, ids: jax.nn.log_softmax(decoder(ids).logits[:, :-1].astype(jnp.float32)))
    losses, likely = [], []
    for start in range(0, len(windows), BATCH):
        ids = jnp.asarray(windows[start : start + BATCH])
        found = log_probs(model.decoder, ids)
        losses.append(-jnp.take_along_axis(found, ids[:, 1:, None], 2)[..., 0].mean(1))
        likely.append(found.argmax(-1))
    made = [one.ids for one in moe_jax.generate(model, prompts, max_new_tokens=NEW_TOKENS)]
    continued = np.full((len(made), NEW_TOKENS), -1)  # after the end of a text
    for i, ids in enumerate(made):
        continued[i, : len(ids)] = ids
    return Answers(np.concatenate(losses).astype(np.float64), np.concatenate(likely), continued)


def row(label: str, path: Path, whole: Answers, found: Answers, versions: str) -> list[Any]:
    """A row of `FOUR_BITS`."""
    more = effect((found.losses - whole.losses).tolist())
    likely = 100 * (found.tokens == whole.tokens).mean(1)
    greedy = 100 * np.cumprod(found.continued == whole.continued, axis=1).mean(1)
    return [label, size(path), float(found.losses.mean()), str(more), share(likely), share(greedy), versions]


def share(percents: np.ndarray) -> str:
    """A mean of percentages, and its interval."""
    found = effect(percents.tolist())
    assert found is not None
    return f"{found.mean:.1f} [{found.low:.1f}, {found.high:.1f}]"


def size(path: Path) -> float:
    """MB of the weights."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files) / 1e6


if __name__ == "__main__":
    ask_for_huge_pages()
    keep_compiled_programs()
    main()
