"""A Mixture-of-Experts on a CPU, whole and compressed: tokens per second, and the memory that it takes.

    python benchmarks/decoding.py --model MODEL [--work WORK] [--tokens 64] [--passes 2] [--quick]
        [--out benchmarks/results]

MODEL is a small dense model, such as SmolLM2-135M. It is upcycled, eight experts in every layer, top-2, with noise that
makes them differ, and written in bfloat16; then compressed in every way whose arithmetic is another one: experts alone,
or the whole model. WORK keeps these models, and what is there is not made again. What the models say does not matter
here.

Each is then loaded in a process of its own, and continues 1, 4 and 16 rows with TOKENS tokens; reads a prompt of 500
tokens; and scores four windows of 512. Programs are compiled before, and of three rounds the fastest counts. All is
done again in a second pass, and the faster one counts: memory that others use makes a pass slow at times. Memory is
what the process has: when the model is loaded, and after a text of 64 tokens, with programs and all. What is measured
is kept in WORK, too, and the same command goes on. `--quick` leaves out all but a few kinds, and all but a single row.

Transformers does the same with the dense model, beside which stands the dense model here; llama.cpp with GGUF files of
the MoE, which `moe-jax export` writes, one row at a time. Their rows are left out, which is said, where a package is
not there (torch and transformers; llama-cpp-python, which is built from source). OUT receives `decoding.json`.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moe_jax
from evidence.layouts import DECODING_MEMORY, DECODING_SPEED
from evidence.other_decoders import LlamaCpp, Transformers
from evidence.results import RESULTS, Figures
from evidence.stamp import current_stamp
from moe_jax.api.model import Loading, Model
from moe_jax.api.open_source import open_source
from moe_jax.commands.environment import ask_for_huge_pages
from moe_jax.commands.memory_of_compiling import return_memory_of_compiling
from moe_jax.evaluation.held_out import Evaluator
from moe_jax.generation.continued_rows import Asked
from moe_jax.generation.engine import MOST_STEPS, Engine

EXPERTS, TOP_K, NOISE, RANK = 8, 2, 0.01, 32
READ, PROMPT, TOLD, ROUNDS = 500, 16, 64, 3
WINDOWS, WINDOW = 4, 512
ROWS = (1, 4, 16)
WHOLE = "bfloat16"


class Kind(NamedTuple):
    """A model and what runs it.

    Attributes:
      folder: of the model, or its file, in WORK.
      made: from the dense model and the folder of the whole MoE, written to a third path; None: it is the dense model.
      dtype: in which it is loaded; None: as it is stored.
      package: that runs it.
      rows: that it continues at once.
    """

    folder: str
    made: Callable[[Path, Path, Path], Any] | None
    dtype: str | None = None
    package: str = "moe_jax"
    rows: tuple[int, ...] = ROWS


def _compressed(method: str, **options: Any) -> Callable[[Path, Path, Path], Any]:
    return lambda dense, whole, out: moe_jax.compress(whole, out, method=method, dtype="bfloat16", **options)


def _upcycled(dense: Path, out: Path, **options: Any) -> None:
    made = moe_jax.upcycle(dense, experts=EXPERTS, top_k=TOP_K, every=1, step0_check=False, **options)
    moe_jax.save(moe_jax.load(made, dtype="bfloat16"), out)


def _in_gguf(kind: str) -> Callable[[Path, Path, Path], Any]:
    return lambda dense, whole, out: moe_jax.export(whole, out, format="gguf", gguf_type=kind)


# Of little text: here it is the speed that counts.
_CALIBRATED: dict[str, Any] = {"calibrate": "built-in", "samples": 16, "seq_len": 512}
_LLAMA: dict[str, Any] = {"package": "llama_cpp", "rows": ROWS[:1]}
KINDS = {
    WHOLE: Kind("whole", lambda dense, whole, out: _upcycled(dense, out, noise=NOISE)),
    "float32": Kind("whole", lambda dense, whole, out: None, "float32"),
    "4 bits": Kind("codes-4", _compressed("quantize", bits=4)),
    "3 bits": Kind("codes-3", _compressed("quantize", bits=3)),
    "2 bits": Kind("codes-2", _compressed("quantize", bits=2)),
    "all in 4 bits": Kind("all-4", _compressed("quantize", bits=4, of="model", embedding_bits=4)),
    "all in 4 bits, embedding in 8": Kind("all-4-8", _compressed("quantize", bits=4, of="model", embedding_bits=8)),
    "4 bits around a centre in 4": Kind("centre-4", _compressed("ders-quantize", bits=4, centre_bits=4)),
    "2 bits over a base": Kind("base-16", _compressed("ders-quantize", bits=2)),
    "2 bits over a base in 4": Kind("base-4", _compressed("ders-quantize", bits=2, centre_bits=4)),
    "3 bits, allocated": Kind("allocated-3", _compressed("allocate", budget_bits=3, of="model", **_CALIBRATED)),
    "PESC in NF4": Kind("pesc", lambda dense, whole, out: _upcycled(dense, out, method="pesc")),
    "low rank": Kind("low-rank", lambda dense, whole, out: _upcycled(dense, out, delta=f"low-rank:{RANK}")),
    "sparse": Kind("sparse", _compressed("ders-sparsify", drop=0.9, keep="magnitude")),
    "llama.cpp, BF16": Kind("whole.gguf", _in_gguf("BF16"), **_LLAMA),
    "llama.cpp, Q4_0": Kind("q4-0.gguf", _in_gguf("Q4_0"), **_LLAMA),
    "llama.cpp, Q4_K_M": Kind("q4-k-m.gguf", _in_gguf("Q4_K_M"), **_LLAMA),
    "dense, bfloat16": Kind("dense", None, "bfloat16"),
    "dense, float32": Kind("dense", None, "float32"),
    "dense in Transformers, bfloat16": Kind("dense", None, "bfloat16", "transformers"),
    "dense in Transformers, float32": Kind("dense", None, "float32", "transformers"),
}
QUICK = (WHOLE, "4 bits", "all in 4 bits", "2 bits over a base")


class Measured(NamedTuple):
    """Attributes:
    file: bytes of the weights on the disk.
    begun, loaded, told: bytes that the process has before and after loading, and after a text.
    tokens: a second, by rows.
    reading: seconds for a prompt.
    scoring: tokens a second; None if it was not measured.
    """

    file: int
    begun: int
    loaded: int
    told: int
    tokens: dict[str, float]
    reading: float
    scoring: float | None

    def fastest(self, other: "Measured") -> "Measured":
        """Returns the higher speeds of two passes, and the memory of the first."""
        tokens = {rows: max(speed, other.tokens[rows]) for rows, speed in self.tokens.items()}
        scoring = None if self.scoring is None or other.scoring is None else max(self.scoring, other.scoring)
        return self._replace(tokens=tokens, reading=min(self.reading, other.reading), scoring=scoring)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="a dense model")
    parser.add_argument("--work", type=Path, help="folder in which models are kept; by default none")
    parser.add_argument("--tokens", type=int, default=64, help="of every row")
    parser.add_argument("--passes", type=int, default=2, help="over all kinds, of which the fastest counts")
    parser.add_argument("--quick", action="store_true", help="a few kinds, one row, no scoring")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        name, folder = options.one
        return_memory_of_compiling()  # as commands do
        print(json.dumps(measured(KINDS[name], Path(folder), options.tokens, quick=options.quick)._asdict()))
        return
    figures = Figures("decoding", options.out, writes=True)
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        found = passed(work, options)
    speed, memory = rows_of(found)
    figures.put_rows(DECODING_SPEED.name, speed)
    figures.put_rows(DECODING_MEMORY.name, memory)
    print(DECODING_SPEED.text(figures), DECODING_MEMORY.text(figures), sep="\n\n")


def kinds(quick: bool) -> tuple[str, ...]:
    """Names of the kinds whose packages are there."""
    wanted = QUICK if quick else tuple(KINDS)
    absent = {name for name in wanted if importlib.util.find_spec(KINDS[name].package) is None}
    for name in sorted(absent):
        print(f"left out: {name}, for {KINDS[name].package} is not there", file=sys.stderr)
    return tuple(name for name in wanted if name not in absent)


def passed(work: Path, options: argparse.Namespace) -> dict[str, Measured]:
    """Does the passes that WORK does not have yet of this commit; returns the fastest of each kind."""
    # Of this code and these options alone.
    key = f"{current_stamp().commit}, {options.tokens} tokens, {'quick' if options.quick else 'whole'}"
    file, found = work / "measured.json", {}
    kept_of_all = json.loads(file.read_text()) if file.exists() else {}
    kept = kept_of_all.setdefault(key, {})
    for number in map(str, range(options.passes)):
        for name in kinds(options.quick):
            of_pass = kept.setdefault(number, {})
            if name not in of_pass:
                of_pass[name] = in_own_process(made(name, options.model, work), name, options)._asdict()
                file.write_text(json.dumps(kept_of_all, indent=1))
            one = Measured(**of_pass[name])
            found[name] = found[name].fastest(one) if name in found else one
    return found


def made(name: str, dense: Path, work: Path) -> Path:
    """Returns the folder of a kind of model, which is made unless it is there."""
    make, folder = KINDS[name].made, work / KINDS[name].folder
    if make is None:
        return dense
    if not folder.exists():
        work.mkdir(parents=True, exist_ok=True)
        make(dense, work / KINDS[WHOLE].folder, folder)
    return folder


def in_own_process(folder: Path, name: str, options: argparse.Namespace) -> Measured:
    command = [sys.executable, __file__, "--model", str(options.model), "--tokens", str(options.tokens)]
    command += ["--one", name, str(folder), *(["--quick"] if options.quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(f"{name}: {done.stdout.strip()}", file=sys.stderr)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def measured(kind: Kind, folder: Path, tokens: int, *, quick: bool) -> Measured:
    """Measures a model in this process, which has done nothing else."""
    begun = resident()
    model = RUNNERS[kind.package](folder, kind.dtype)
    loaded = resident()
    model.tell(1, TOLD)
    told = resident()
    speeds = {}
    for rows in ROWS[:1] if quick else kind.rows:
        seconds = min(second for _ in range(1 + ROUNDS) for second in model.tell(rows, tokens))
        speeds[str(rows)] = rows / seconds
    reading, scoring = fastest(lambda: model.read(READ)), None
    if not quick:
        ids = np.random.default_rng(0).integers(3, model.vocabulary, (WINDOWS, WINDOW))
        scoring = ids.size / fastest(lambda: model.score(ids))
    files = [folder] if folder.is_file() else [*(folder / "params").rglob("*"), *folder.glob("*.safetensors")]
    size = sum(file.stat().st_size for file in files if file.is_file())
    return Measured(size, begun, loaded, told, speeds, reading, scoring)


class Ours:
    """A model of this library, as `other_decoders` has others."""

    def __init__(self, folder: Path, dtype: str | None):
        self._source = folder, dtype
        opened = open_source(folder)
        # As `generate` loads it, but for the dtype.
        loading = dataclasses.replace(Loading.for_generation(opened), dtype=dtype)
        self._model = Model.of_source(opened, loading)
        self._model.read()
        self.vocabulary = self._model.config.vocab_size
        self._scored: tuple[Evaluator, nnx.State] | None = None

    def tell(self, rows: int, tokens: int) -> list[float]:
        return continued(self._engine, rows, tokens)

    def read(self, length: int) -> Any:
        return read(self._engine, 1, length)

    @cached_property
    def _engine(self) -> Engine:
        return Engine(self._model.decoder, draws=False)

    def score(self, ids: np.ndarray) -> Any:
        """Layers are stacked, as `evaluate` has them: one program for all."""
        if self._scored is None:
            folder, dtype = self._source
            graphdef, state = nnx.split(moe_jax.load(folder, dtype=dtype).decoder)
            evaluator = Evaluator(graphdef, ids.reshape(-1), seq_len=ids.shape[1], batch_size=ids.shape[0])
            self._scored = evaluator, state
        evaluator, state = self._scored
        return evaluator(state)


RUNNERS: dict[str, Callable[[Path, str | None], Any]] = {
    "moe_jax": Ours,
    "transformers": Transformers,
    "llama_cpp": lambda file, dtype: LlamaCpp(file, max(READ, PROMPT + TOLD, WINDOW)),
}


def read(engine: Engine, rows: int, length: int, room: int = 0) -> Any:
    """Reads a prompt per row, all of some length, with room for so many tokens after them."""
    most = jnp.full((rows,), 1 << 20, jnp.int32)
    numbers = jnp.zeros((rows,))
    asked = Asked(
        key=jax.random.key(0),
        temperature=numbers,
        top_k=jnp.zeros((rows,), jnp.int32),
        top_p=numbers + 1,
        stop_ids=jnp.full((rows, 1), -1, jnp.int32),  # all texts have the same length
        most=most,
        scores=jnp.zeros((rows,), bool),
    )
    prompts = np.random.default_rng(1).integers(3, engine.config.vocab_size, (rows, length)).tolist()
    return engine.read(prompts, asked, engine.room(length + room))[0]


def continued(engine: Engine, rows: int, tokens: int) -> list[float]:
    """Continues rows; returns the seconds of a token, block by block."""
    state, stay, seconds = read(engine, rows, PROMPT, tokens + MOST_STEPS), np.ones(rows, bool), []
    for _ in range(-(-tokens // MOST_STEPS)):
        start = time.perf_counter()
        state, block = engine.advance(state, min(tokens, MOST_STEPS), stay=stay)
        seconds.append((time.perf_counter() - start) / len(block.tokens))
    return seconds


def fastest(work: Callable[[], Any]) -> float:
    """Seconds of the fastest round, after one in which programs are compiled."""
    spent = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(work())
        spent.append(time.perf_counter() - start)
    return min(spent[1:])


def resident() -> int:
    """Bytes of memory that this process has."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


def rows_of(found: dict[str, Measured]) -> tuple[list[list[Any]], list[list[Any]]]:
    """The rows of the tables; ratios are to the whole MoE in bfloat16."""
    whole, speed, memory = found[WHOLE], [], []
    for name, one in found.items():
        cells = [[one.tokens[rows], one.tokens[rows] / whole.tokens[rows]] if rows in one.tokens else None
                 for rows in map(str, ROWS)]  # fmt: skip
        scoring = [one.scoring, one.scoring / whole.scoring] if one.scoring and whole.scoring else None
        speed.append([name, *cells, [one.reading, one.reading / whole.reading], scoring])
        sizes = [one.file, one.loaded - one.begun, one.told, one.told - one.begun - one.file]
        memory.append([name, *(size / 1e6 for size in sizes), one.told / whole.told])
    return speed, memory


if __name__ == "__main__":
    ask_for_huge_pages()
    main()
