"""What `moe-jax plan --train` foretells of memory and speed, against real runs of the same recipes on this machine.

    python benchmarks/plan_train.py MODEL [--tower TOWER] [--only CASE ...] [--steps 6] [--out benchmarks/results]

MODEL is SmolLM2-135M-Instruct and TOWER is DINOv2-S, Hugging Face directories; without the second, cases with pictures
are left out. Every case is a recipe, which is given to `moe-jax plan --train RECIPE --json` and then to
`moe-jax train RECIPE`, each a process of its own with nothing compiled before. Measured are the highest resident memory
of the second, as the kernel counts it, and the median speed of its steps after the first. Both are to be foretold
within 15 %; the time of checkpoints, and of steps with pictures, is not foretold.

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
from moe_jax.demo.small_world import write_world

GB = 1e9
LENGTH = 256
TEXT = ROOT / "benchmarks" / "results" / "claims.md"


class Case(NamedTuple):
    """Attributes:
    name: of its row.
    settings: of the recipe, as `--set` takes them; FOLDER is that of the case.
    made_by: the command that makes the model of MODEL, without the names of the two; empty: MODEL itself. Of cases with
      pictures, it is given MODEL with TOWER before it.
    pictures: number in every row; 0: texts are read.
    """

    name: str
    settings: tuple[str, ...] = ()
    made_by: tuple[str, ...] = ()
    pictures: int = 0


_EYE = ("--size", "224", "--projector", "pixel_shuffle:2,linear,gelu,linear", "--placeholder", "<filename>")
_PROJECTOR, _FFNS = "vision/projector/.*", "layers/.*/mlp/.*"
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
    Case("pictures, stage 1: the projector, features kept", (f'partition.train=["{_PROJECTOR}"]',
         "data.feature_cache=FOLDER/kept"), pictures=2),
    Case("pictures, stage 2: language model and projector", ('partition.freeze=["vision/tower/.*"]',), pictures=2),
    Case("pictures, stage 3: 4 experts in layers 0, 2, 4, ...", (f'partition.train=["{_FFNS}","{_PROJECTOR}"]',),
         ("upcycle", "--experts", "4", "--top-k", "2", "--every", "2", "--first", "0"), pictures=2),
    Case("pictures, all with the tower, remat full", ("model.remat=full",), pictures=2),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("model", type=Path, metavar="MODEL", help="SmolLM2-135M-Instruct, a Hugging Face directory")
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=names, default=names, help="leave the others")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--tower", type=Path, help="DINOv2-S, a Hugging Face directory")
    options = parser.parse_args()
    figures = Figures("plan_train", options.out, writes=True)
    tower = options.tower and options.tower.absolute()
    for case in (case for case in CASES if case.name in options.only and (tower or not case.pictures)):
        figures.put_row(PLAN_TRAIN.name, case.name, row(case, options.model.absolute(), tower, options.steps))
        print(json.dumps(figures.rows(PLAN_TRAIN.name)[-1]), flush=True)
    print(PLAN_TRAIN.text(figures))


def row(case: Case, model: Path, tower: Path | None, steps: int) -> list:
    """Plans and runs a case; returns its row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder, source = Path(name), TEXT
        given = [
            f"run_dir={folder / 'run'}",
            "train.batch_size=2",
            *(setting.replace("FOLDER", name) for setting in case.settings),
        ]
        flags: tuple[str, ...] = ()
        if case.pictures:
            write_world(folder / "world", train=100, test=0)
            source = folder / "world" / "train.jsonl"
            given += [f"data.max_pictures={case.pictures}", "data.chat_template=llava-v1"]
            flags = "--pictures", str(case.pictures)
            run(folder, "attach", str(model), str(folder / "seeing"), "--tower", str(tower), *_EYE)
            model = folder / "seeing"
        if case.made_by:
            verb, *options = case.made_by
            run(folder, verb, str(model), str(folder / "model"), *options)
            model = folder / "model"
        recipe = write_recipe(
            folder / "recipe.toml", source, seq_len=LENGTH, learning_rate=1e-5, warmup_steps=0, steps=steps
        )
        given.append(f"model.path={model}")
        output, _ = run(folder, "plan", "--train", str(recipe), *flags, "--set", *given, "--json")
        planned = json.loads(output)["training"]
        _, peak = run(folder, "train", str(recipe), "--set", *given)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        # The first step is compiled in its time.
        speed = statistics.median(json.loads(line)["tokens_per_second"] for line in lines[1:])
    timed = not case.pictures and "checkpoint.every=1" not in case.settings
    foretold = planned["time"]["tokens_per_second"] if timed else None
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
