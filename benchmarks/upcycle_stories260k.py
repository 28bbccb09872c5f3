"""stories260K upcycled with every delta kind and tuned to TinyShakespeare, beside the dense model tuned as long.

    python benchmarks/upcycle_stories260k.py DATA [--steps 60] [--out benchmarks/results]

DATA is a folder with `weights/stories260K/hf` and `text/tinyshakespeare/input.txt`; the last tenth of the text is held
out. Every model has 4 experts, top-2, in every layer. Everything is done with the commands that a user would type.
OUT receives `upcycle_stories260k.json`.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from evidence.commands import run, write_recipe
from evidence.layouts import UPCYCLED
from evidence.results import RESULTS, Figures

DELTAS = {"vanilla": "full", "DeRS-LM, rank 4": "low-rank:4", "DeRS-SM, rate 0.9": "sparse:0.9"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("upcycle_stories260k", options.out, writes=True)
    dense = options.data / "weights" / "stories260K" / "hf"
    text = (options.data / "text" / "tinyshakespeare" / "input.txt").read_text()
    cut = len(text) * 9 // 10
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.txt").write_text(text[:cut])
        (folder / "held-out.txt").write_text(text[cut:])
        recipe = write_recipe(
            folder / "recipe.toml",
            folder / "train.txt",
            seq_len=256,
            learning_rate=1e-3,
            warmup_steps=10,
            steps=options.steps,
        )

        def held_out(model: Path) -> float:
            return json.loads(run("eval", model, "--text", folder / "held-out.txt", "--seq-len", 256, "--json"))["nll"]

        print(f"dense, before: held-out loss {held_out(dense):.4f}")
        models = {"dense, trained as long": dense}
        for kind, delta in DELTAS.items():
            models[kind] = folder / delta
            run("upcycle", dense, models[kind], "--experts", 4, "--top-k", 2, "--every", 1, "--delta", delta)
            step0 = json.loads((models[kind] / "lineage.json").read_text())[-1]["measured"]
            print(f"{kind}: step-0 {step0}")
        rows = []
        for index, (kind, model) in enumerate(models.items()):
            run_dir = folder / f"run{index}"
            run("train", recipe, "--set", f"model.path={model}", f"run_dir={run_dir}")
            added = json.loads(run("plan", run_dir / "model", "--json"))["added_params"] or 0
            rows.append([kind, added, held_out(run_dir / "model")])
    figures.put_rows(UPCYCLED.name, rows)
    print(UPCYCLED.text(figures))


if __name__ == "__main__":
    main()
