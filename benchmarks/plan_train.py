"""What `moe-jax plan --train` foretells of memory and speed, against real runs of the same recipes on this machine.

    python benchmarks/plan_train.py MODEL [--only CASE ...] [--steps 6] [--out benchmarks/results]

MODEL is SmolLM2-135M-Instruct as a Hugging Face directory. Every case is a recipe, which is given to
`moe-jax plan --train RECIPE --json` and then to `moe-jax train RECIPE`, each a process of its own with nothing compiled
before. Measured are the highest resident memory of the second, as the kernel counts it, and the median speed of its
steps after the first. Both are to be foretold within 15 %; the time of checkpoints is not foretold.

The cases take 3 to 7 GB of memory and about a minute each on two idle cores. OUT receives `plan_train.json`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from evidence.commands import write_recipe
from evidence.layouts import PLAN_TRAIN
from evidence.results import RESULTS, Figures
from evidence.stamp import ROOT

GB = 1e9
LENGTH = 256
TEXT = ROOT / "BENCHMARKS.md"


class Case(NamedTuple):
    """Attributes:
    name: of its row.
    settings: of the recipe, as `--set` takes them.
    made_by: the command that makes the model of MODEL, without the names of the two; empty: MODEL itself.
    """

    name: str
    settings: tuple[str, ...] = ()
    made_by: tuple[str, ...] = ()


_LOW_RANK = ("upcycle", "--experts", "4", "--top-k", "2", "--every", "2", "--delta", "low-rank:16")
CASES = (
    Case("dense, AdamW"),
    Case("dense, AdamW, remat full, 4 x 512", ("model.remat=full", "data.seq_len=512", "train.batch_size=4")),
    Case("dense, parameters in bfloat16, Adafactor", ("model.param_dtype=bfloat16", "optimizer.kind=adafactor")),
    Case("dense, Muon with moments in bfloat16, average", ("optimizer.kind=muon", "optimizer.moments=bfloat16",
         "ema.decay=0.99")),
    Case("dense, 8 rows in 4 microbatches", ("train.batch_size=8", "train.accumulation=4")),
    Case("4 low-rank experts in every second layer, AdamW", (), _LOW_RANK),
    Case("LoRA of rank 8 on a frozen base", (), ("adapt", "--method", "lora", "--adapter", "lora:8", "--targets",
         "q,v")),
    Case("dense, a checkpoint after every step", ("checkpoint.every=1",)),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("model", type=Path, metavar="MODEL", help="SmolLM2-135M-Instruct, a Hugging Face directory")
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=names, default=names, help="leave the others")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("plan_train", options.out, writes=True)
    for case in (case for case in CASES if case.name in options.only):
        figures.put_row(PLAN_TRAIN.name, case.name, row(case, options.model.absolute(), options.steps))
        print(json.dumps(figures.rows(PLAN_TRAIN.name)[-1]), flush=True)
    print(PLAN_TRAIN.text(figures))


def row(case: Case, model: Path, steps: int) -> list:
    """Plans and runs a case; returns its row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.made_by:
            verb, *flags = case.made_by
            run(folder, verb, str(model), str(folder / "model"), *flags)
            model = folder / "model"
        recipe = write_recipe(
            folder / "recipe.toml", TEXT, seq_len=LENGTH, learning_rate=1e-5, warmup_steps=0, steps=steps
        )
        given = [f"model.path={model}", f"run_dir={folder / 'run'}", "train.batch_size=2", *case.settings]
        output, _ = run(folder, "plan", "--train", str(recipe), "--set", *given, "--json")
        planned = json.loads(output)["training"]
        _, peak = run(folder, "train", str(recipe), "--set", *given)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        # The first step is compiled in its time.
        speed = statistics.median(json.loads(line)["tokens_per_second"] for line in lines[1:])
    foretold = None if "checkpoint.every=1" in case.settings else planned["time"]["tokens_per_second"]
    return [
        case.name,
        planned["total"] / GB,
        peak / GB,
        100 * (planned["total"] / peak - 1),
        foretold,
        speed,
        None if foretold is None else 100 * (foretold / speed - 1),
    ]


def run(folder: Path, *words: str) -> tuple[str, int]:
    """What a command prints, and its peak resident memory in bytes."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / f"cache of {words[0]}")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "moe_jax.commands.cli", *words]
    with (folder / "printed").open("w+") as printed:
        process = subprocess.Popen(command, env=environment, stdout=printed, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"moe-jax {' '.join(words)} failed")
        printed.seek(0)
        return printed.read(), usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
