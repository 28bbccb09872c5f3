"""Training steps of the recipes for pods and GPU servers, by their compilers: memory, collectives and the least time.

    python benchmarks/pods.py [--only RECIPE ...] [--rows TEXT] [--python PYTHON] [--out benchmarks/results]

Each is what `moe-jax train RECIPE --compile-only --topology TOPOLOGY --config CONFIG --json` says, in a process of its
own, and takes minutes; there is neither TPU nor GPU. TPUs need libtpu (`pip install -e '.[test]'`), on x86 Linux; GPUs
need PYTHON to be one with the extra `gpu`, and are left out without it. OUT receives `pods.json`, and the head of every
recipe says what was found of it.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from evidence.layouts import POD_EXCHANGES, POD_SCALING, POD_STEPS
from evidence.results import RESULTS, Figures
from evidence.stamp import ROOT, Stamp, current_stamp
from moe_jax.models.serialize import VERSION
from moe_jax.planning.planned_devices import is_gpu

RECIPES = ROOT / "train" / "recipes"
GIB = 2**30
HEADER = "# Compiled, by `python benchmarks/pods.py`, which needs neither TPU nor GPU:\n"


class Step(NamedTuple):
    """Attributes:
    recipe, config: names of files without their endings.
    topology: of the slice, or of the GPUs.
    experts: what the table calls the experts.
    bank: what replaces the bank of the config; None: nothing; empty: one expert, without a router, replaces the MoE.
    options: of the recipe, as `--set` takes them.
    table: that the row is in: `steps`, or what a row is one of several for.
    """

    recipe: str
    config: str
    topology: str
    experts: str
    bank: dict[str, Any] | None = None
    options: tuple[str, ...] = ()
    table: str = POD_STEPS.name

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{self.recipe} ({self.experts}, {self.topology})"

    @property
    def is_on_gpus(self) -> bool:
        return is_gpu(self.topology)


_LOW_RANK, _VANILLA = "low-rank deltas, rank 16", {"kind": "full"}
_SPARSE, _CODES = {"kind": "sparse", "rate": 0.99}, {"kind": "quantized", "bits": 2, "group_size": 128}
_CODER = ("ders_coder_moe", "ders_coder_moe", "v5e:4x4")
_LLAMA = ("llama2_7b_low_rank_v5e_4x4", "llama2_7b_low_rank", "v5e:4x4")
_MIXTRAL = ("mixtral_8x7b_v5p_4x4x4", "mixtral_8x7b")
_QWEN = ("perft_qwen3_30b_2bit", "perft_qwen3_30b_2bit")
STEPS = (
    Step(*_CODER, _LOW_RANK),
    Step(*_CODER, "sparse deltas, rate 0.99", _SPARSE),
    Step(*_CODER, "vanilla", _VANILLA),
    Step(*_CODER, "dense", {}),
    Step(*_LLAMA, _LOW_RANK),
    Step(*_LLAMA, "dense", {}),
    Step(*_LLAMA, "sparse deltas, rate 0.99", _SPARSE),
    Step(*_LLAMA, "2-bit deltas, groups of 128", _CODES),
    Step(*_LLAMA[:2], "h100:8", _LOW_RANK, None, ("mesh.fsdp=8",)),
    Step("llama2_7b_vanilla_v5p_2x2x4", "llama2_7b_vanilla", "v5p:2x2x4", "vanilla"),
    Step("llama2_7b_vanilla_v5p_2x2x4", "llama2_7b_vanilla", "v5p:2x2x4", "dense", {}),
    Step(*_MIXTRAL, "v5p:4x4x4", "vanilla"),
    Step(*_MIXTRAL, "h100:4x8", "vanilla", None, ("mesh.fsdp=4", "train.batch_size=32")),
    Step(*_MIXTRAL, "b200:8", "vanilla", None, ("mesh.fsdp=1", "train.batch_size=8")),
    Step("camelidae_8x7b", "camelidae_8x7b", "v5e:2x4", "PESC over NF4"),
    Step("camelidae_8x34b", "camelidae_8x34b", "v6e:2x4", "PESC over NF4"),
    Step("perft_olmoe", "perft_olmoe", "v5e:2x4", "PERFT-R beside full experts"),
    Step("perft_mixtral", "perft_mixtral", "v6e:2x4", "PERFT-R beside full experts"),
    Step(*_QWEN, "v5e:2x4", "PERFT-R beside 2-bit experts"),
    # The same tokens for every chip: 4096. Parameters are split over 16 chips, and every 16 have all of them.
    *(
        Step(*_MIXTRAL, topology, f"{chips} chips", None,
             ("mesh.fsdp=2", f"mesh.data={chips // 16}", f"train.batch_size={chips}"), POD_SCALING.name)
        for chips, topology in ((16, "v5p:2x2x4"), (64, "v5p:4x4x4"), (128, "v5p:4x4x8"), (512, "v5p:8x8x8"))
    ),
    # Few experts on every chip, until there is one.
    *(
        Step("perft_olmoe", "perft_olmoe", topology, f"{expert} chips for 64 experts", None,
             ("mesh.fsdp=1", f"mesh.expert={expert}", f"train.batch_size={16 * expert}", "model.exchange=all-to-all"),
             POD_EXCHANGES.name)
        for expert, topology in ((8, "v5p:2x2x2"), (16, "v5p:2x2x4"), (64, "v5p:4x4x4"))
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    names = sorted({step.recipe for step in STEPS})
    parser.add_argument("--only", nargs="+", metavar="RECIPE", choices=names, default=names, help="leave the others")
    parser.add_argument("--rows", default="", help="only rows whose names hold this text")
    parser.add_argument("--python", type=Path, help="a Python with JAX's CUDA plugin, for the rows of GPUs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    # What a program takes is the compiler's doing.
    figures = Figures("pods", options.out, writes=True, stamp=partial(current_stamp, also=("libtpu",)))
    failed = []
    for step in (step for step in STEPS if step.recipe in options.only and options.rows in step.name):
        python = options.python if step.is_on_gpus else Path(sys.executable)
        if python is None:
            print(f"left out: {step.name}", file=sys.stderr)
            continue
        print(step.name, file=sys.stderr)
        found = compiled(step, python)
        if found is None:
            failed.append(step.name)
            # What was measured once is no longer so.
            figures.forget("rows", step.table, step.name)
        else:
            figures.put_row(step.table, step.name, cells(step, found))
    for table in (POD_STEPS, POD_SCALING, POD_EXCHANGES):
        print(table.text(figures), end="\n\n")
    for recipe in names:
        write_header(recipe, figures)
    if failed:
        raise SystemExit(f"not compiled: {'; '.join(failed)}")


def compiled(step: Step, python: Path) -> dict[str, Any] | None:
    """What the command says of a step; None if it does not compile (the command says why)."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "config.json"
        file.write_text(json.dumps(config_of(step)))
        command = [
            python,
            "-m",
            "moe_jax.commands.cli",
            "train",
            RECIPES / f"{step.recipe}.toml",
            "--compile-only",
        ]
        command += ["--topology", step.topology, "--config", file, "--json"]
        command += ["--set", *step.options] if step.options else []
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    if not done.stdout:
        return None
    # A step that needs more than a chip has is reported before the command ends with an error.
    return json.loads(done.stdout)


def config_of(step: Step) -> dict[str, Any]:
    """The config.json of the model of a step."""
    config = json.loads((RECIPES / "configs" / f"{step.config}.json").read_text())
    if step.bank == {}:
        replace_moes(config)
    elif step.bank is not None:
        replace_banks(config, step.bank)
        # Older configs with codes mean other codes; these come from nowhere.
        config["version"] = VERSION
    if step.table == POD_EXCHANGES.name:
        train_all(config)
    return config


def cells(step: Step, found: dict[str, Any]) -> list[Any]:
    """The cells of a step's row."""
    held, total, memory = (found["bytes"][name] / GIB for name in ("arguments", "total", "hbm"))
    milliseconds = [1e3 * found["estimate"][name] for name in ("matrix", "memory", "links", "seconds")]
    used = found["estimate"]["utilisation"]
    sent = {kind: counted["bytes"] / 1e9 for kind, counted in found["collectives"].items()}
    if step.table == POD_SCALING.name:
        return [found["chips"], _mesh(found), total, milliseconds[-1], used, sum(sent.values())]
    if step.table == POD_EXCHANGES.name:
        return [found["mesh"]["expert"], sent["ragged-all-to-all"], milliseconds[-1]]
    sent_in_all = sum(sent.values())
    return [step.recipe, step.experts, step.topology, _mesh(found), held, total, memory, sent_in_all, *milliseconds,
            used]  # fmt: skip


def _mesh(found: dict[str, Any]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items() if size > 1)


def header(recipe: str, figures: Figures) -> str:
    """What the head of a recipe says: a line for every row of its own, without those of which others are variants."""
    lines = []
    for step in (step for step in STEPS if step.recipe == recipe and step.table == POD_STEPS.name):
        row = (figures.get("rows", step.table, step.name) or {}).get("cells")
        if row is None:
            continue
        _, experts, topology, _, held, total, memory, _, _, _, _, least, used = row
        lines += [
            f"#   {topology}, {experts}: {held:.1f} GiB of parameters and optimizer state per chip, {total:.1f} in all",
            f"#     (of {memory:.0f}); a step takes at least {least:,.0f} ms, with a utilisation of at most {used:.0%}",
            f"#     ({_made(figures.stamp_of('rows', step.table, step.name))})",
        ]
    return HEADER + "".join(f"{line}\n" for line in lines)


def _made(stamp: Stamp) -> str:
    return f"{stamp.date}, commit {(stamp.commit or 'none')[:7]}"


def head_of(text: str) -> str:
    """The part of a recipe's text that `header` makes; empty: there is none."""
    found = re.search(re.escape(HEADER) + r"(?:#   .*\n)*", text)
    return found[0] if found else ""


def write_header(recipe: str, figures: Figures) -> None:
    """Puts the figures into the recipe."""
    file = RECIPES / f"{recipe}.toml"
    text = file.read_text()
    file.write_text(text.replace(head_of(text), header(recipe, figures)))


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


def train_all(config: dict[str, Any]) -> None:
    """Takes the adapters of a tuned model away, so that the model itself is trained."""
    config["frozen_base"] = False
    for segment in config["segments"]:
        for layer in segment["pattern"]:
            layer["moe"]["perft"] = None


if __name__ == "__main__":
    main()
