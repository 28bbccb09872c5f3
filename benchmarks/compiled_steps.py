"""Training steps of the recipes for TPU slices, by the TPU compiler: memory, and the least time; no TPU is needed.

    python benchmarks/compiled_steps.py [--only RECIPE ...] [--out benchmarks/results]

Each is what `moe-jax train RECIPE --compile-only --topology TOPOLOGY --config CONFIG --json` says, in a process of its
own, and takes minutes. Needs libtpu (`pip install -e '.[test]'`), which runs on x86 Linux. OUT receives
`compiled_steps.json`; the comments of the recipes quote it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from evidence.layouts import COMPILED, COMPILED_ESTIMATES
from evidence.results import RESULTS, Figures
from evidence.stamp import ROOT, current_stamp
from moe_jax.models.serialize import VERSION

RECIPES = ROOT / "train" / "recipes"
GIB = 2**30


class Step(NamedTuple):
    """Attributes:
    recipe, config: names of files without their endings.
    topology: of the slice.
    experts: what the table calls the experts.
    bank: what replaces the bank of the config; None: nothing; empty: one expert, without a router, replaces the MoE.
    options: of the command.
    """

    recipe: str
    config: str
    topology: str
    experts: str
    bank: dict[str, Any] | None = None
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{self.recipe} ({self.experts})"


_LLAMA = ("llama2_7b_low_rank_v5e_4x4", "llama2_7b_low_rank", "v5e:4x4")
STEPS = (
    Step("mixtral_8x7b_v5p_4x4x4", "mixtral_8x7b", "v5p:4x4x4", "full"),
    Step(*_LLAMA, "low-rank deltas, rank 16"),
    Step(*_LLAMA, "dense", {}),
    Step(*_LLAMA, "sparse deltas, rate 0.99", {"kind": "sparse", "rate": 0.99}),
    Step(*_LLAMA, "2-bit deltas, groups of 128", {"kind": "quantized", "bits": 2, "group_size": 128}),
    Step("camelidae_8x7b", "camelidae_8x7b", "v5e:2x4", "PESC over NF4", None, ("--set", "mesh.fsdp=8")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    names = sorted({step.recipe for step in STEPS})
    parser.add_argument("--only", nargs="+", metavar="RECIPE", choices=names, default=names, help="leave the others")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    # What a program takes is the compiler's doing.
    figures = Figures("compiled_steps", options.out, writes=True, stamp=partial(current_stamp, also=("libtpu",)))
    failed = []
    for step in (step for step in STEPS if step.recipe in options.only):
        found = compiled(step)
        for table, cells_of in ((COMPILED, sizes), (COMPILED_ESTIMATES, estimate)):
            if found is None:
                # What was measured once is no longer so.
                figures.forget("rows", table.name, step.name)
            else:
                figures.put_row(table.name, step.name, [step.recipe, step.experts, step.topology, *cells_of(found)])
        if found is None:
            failed.append(step.name)
    print(COMPILED.text(figures), COMPILED_ESTIMATES.text(figures), sep="\n\n")
    if failed:
        raise SystemExit(f"not compiled: {'; '.join(failed)}")


def compiled(step: Step) -> dict[str, Any] | None:
    """What the command says of a step; None if it does not compile (the command says why)."""
    with tempfile.TemporaryDirectory() as name:
        config = json.loads((RECIPES / "configs" / f"{step.config}.json").read_text())
        if step.bank == {}:
            replace_moes(config)
        elif step.bank is not None:
            replace_banks(config, step.bank)
            # Older configs with codes mean other codes; these come from nowhere.
            config["version"] = VERSION
        file = Path(name) / "config.json"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "moe_jax.cli", "train", RECIPES / f"{step.recipe}.toml", "--compile-only"]
        command += ["--topology", step.topology, "--config", file, *step.options, "--json"]
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    if not done.stdout:
        return None
    # A step that needs more than a chip has is reported before the command ends with an error.
    return json.loads(done.stdout)


def sizes(found: dict[str, Any]) -> list[float]:
    """Cells of `COMPILED`."""
    return [found["bytes"][name] / GIB for name in ("arguments", "total", "hbm")]


def estimate(found: dict[str, Any]) -> list[float]:
    """Cells of `COMPILED_ESTIMATES`."""
    sent = sum(kind["bytes"] for kind in found["collectives"].values()) / 1e9
    times = (1e3 * found["estimate"][name] for name in ("matrix", "memory", "links", "seconds"))
    return [sent, *times, found["estimate"]["utilisation"]]


def replace_moes(config: dict[str, Any]) -> None:
    """Puts one expert, as a dense FFN, in the place of every MoE in a config."""
    for segment in config["segments"]:
        for layer in segment["pattern"]:
            if "moe" in layer:
                layer["ffn"] = layer.pop("moe")["expert"]


def replace_banks(node: Any, bank: dict[str, Any]) -> None:
    """Puts another bank in place of every one in a config."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == "bank":
            node[key] = bank
        else:
            replace_banks(value, bank)


if __name__ == "__main__":
    main()
