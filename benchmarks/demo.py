"""The demo on a real language model, `make demo`: what it makes, how well that does, and how long every step takes.

    python benchmarks/demo.py MODEL [--tower TOWER] [--work FOLDER] [--out benchmarks/results]

MODEL is a dense language model with a chat template, such as the GGUF file of SmolLM2-135M-Instruct that `make demo`
fetches. The demo runs in FOLDER, by default a temporary one, in a process of its own, as a user starts it: nothing that
was compiled before is found. FOLDER of a demo that is finished, which this code made, is taken as it is. Then its
models are asked a question each, by `moe-jax generate`, twice: first with nothing compiled. OUT receives `demo.json`.
With TOWER, an image encoder such as the one that `make demo-vision` fetches, it is the demo of a model that sees, and
`demo_vision.json`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from evidence.layouts import DEMO_MODELS, DEMO_STEPS, DEMO_VISION_MODELS, DEMO_WAITS
from evidence.results import RESULTS, Figures
from evidence.stamp import ROOT, current_stamp
from moe_jax.demo.comparison import RESULTS as DEMO_RESULTS
from moe_jax.demo.comparison import read_results

IN_ALL = "in all"
"""The last row of steps."""
ASKED = {"dense, as it came": "dense", "upcycled and tuned": "run/model", "4 bits": "4-bit", "whole model": "whole"}
"""The models that are asked, and their folders below that of the demo."""
QUESTION = ("--prompt", "Why is the sky blue? Answer in one sentence.", "--chat", "--max-new-tokens", "32")
_SPEED = re.compile(r"(\d+) tokens in ([0-9.]+) s: the first after ([0-9.]+) s, ([0-9.]+) a second once compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--tower", type=Path, help="an image encoder: the demo of a model that sees")
    parser.add_argument("--work", type=Path, help="folder of the demo; one that is finished is taken as it is")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    if not options.model.exists():
        parser.error(f"there is no model {options.model}")
    stamp = current_stamp()  # of the code that runs, whatever happens to the checkout meanwhile
    name_of_file = "demo" if options.tower is None else "demo_vision"
    figures = Figures(name_of_file, options.out, writes=True, stamp=lambda: stamp)
    with tempfile.TemporaryDirectory() as name:
        work = options.work or Path(name) / "demo"
        if not (work / DEMO_RESULTS).exists():
            run_demo(options.model, options.tower, work, Path(name) / "cache")
        if options.tower is None:
            put(figures, read_results(work))
            figures.put_rows(DEMO_WAITS.name, waits(work, Path(name)))
        else:
            put_seeing(figures, json.loads((work / DEMO_RESULTS).read_text("utf-8")))
    models = DEMO_MODELS if options.tower is None else DEMO_VISION_MODELS
    tables = [models, DEMO_STEPS, *([DEMO_WAITS] if options.tower is None else [])]
    print("\n\n".join(table.text(figures) for table in tables))


def run_demo(model: Path, tower: Path | None, work: Path, cache: Path) -> None:
    """Runs the demo as a user would; `cache` is an empty folder, in which it finds nothing that was compiled."""
    words = ["demo", "--model", model, "--dir", work, *([] if tower is None else ["--tower", tower])]
    if _command(*words, *(["--resume"] if work.exists() else []), cache=cache).returncode:
        raise SystemExit("the demo failed, for the reason above")


def waits(work: Path, caches: Path) -> list[list[Any]]:
    """Returns how long each model of a demo was waited for; in `caches` are folders that are empty at first."""
    rows = []
    for number, (name, folder) in enumerate(ASKED.items()):
        cache, starts = caches / f"cache-{number}", []
        for _ in range(2):
            told = _command("generate", work / folder, *QUESTION, cache=cache, stderr=subprocess.PIPE, text=True).stderr
            if (found := _SPEED.search(told)) is None:
                raise SystemExit(f"{name} said: {told}")
            tokens, seconds, first, speed = map(float, found.groups())
            starts += [first, seconds]
        rows.append([name, *starts, int(tokens), speed])
    return rows


def _command(*words: object, cache: Path, **options: Any) -> Any:
    """Runs `moe-jax` in a process that keeps in `cache` what it compiles, and finds what is there."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPILATION")}
    environment = kept | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "moe_jax.commands.cli", *map(str, words)]
    return subprocess.run(command, env=environment, check=False, **options)


def put(figures: Figures, found: dict[str, Any]) -> None:
    """Stores what a demo found: a row for every model, and one for every step."""
    rows, whole = found["rows"], next(row for row in found["rows"] if row.name == found["whole"])
    figures.put_rows(
        DEMO_MODELS.name,
        [
            [
                *(row.name, row.params, row.nbytes / 1e6),
                None if row.expert_bytes is None else row.expert_bytes / 1e6,
                *(row.expert_bits, row.perplexity),
                None if row.expert_bytes is None or row is whole else row.nll - whole.nll,
            ]
            for row in rows
        ],
    )
    put_steps(figures, found["seconds"])


def put_seeing(figures: Figures, found: dict[str, Any]) -> None:
    """Stores what a demo of a model that sees found."""
    rows = []
    for model in found["models"]:
        right, asked = map(sum, zip(*model["right"].values(), strict=True))
        experts = None if model["expert_bytes"] is None else model["expert_bytes"] / 1e6
        rows.append([model["name"], model["params"], model["nbytes"] / 1e6, experts, right, asked,
                     model["tokens_per_second"]])  # fmt: skip
    figures.put_rows(DEMO_VISION_MODELS.name, rows)
    put_steps(figures, found["seconds"])


def put_steps(figures: Figures, seconds: dict[str, float]) -> None:
    steps = [[title, took] for title, took in seconds.items()]
    figures.put_rows(DEMO_STEPS.name, [*steps, [IN_ALL, sum(seconds.values())]])


if __name__ == "__main__":
    main()
