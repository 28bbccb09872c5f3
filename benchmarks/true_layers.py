"""MoE layers of true shapes through `moe-jax compress`, from the files to the files.

    python benchmarks/true_layers.py [--layers NAME ...] [--exact] [--folder DIR] [--out benchmarks/results]
        [-- OPTIONS]
    python benchmarks/true_layers.py --calibrated [--layers NAME ...] [--cases NAME ...] [--processes 2]
    python benchmarks/true_layers.py --compile h100:1 ...

One layer each of Mixtral-8x7B (8 experts of 14336 neurons, width 4096), DeepSeekMoE-16B (64 of 1408, width 2048) and
Qwen3-30B-A3B (128 of 768, width 2048), bfloat16. The weights are synthetic, twice:

- planted: a common expert, to which each adds noise of half its norm and an order of its own of the neurons;
- independent: experts that have nothing in common, so that no order is plain and nothing can be proven early.

A layer is written to the disk as a model directory and compressed by the command itself in another process, whose
greatest resident memory is reported; it needs 10 GB of disk. By `resmoe`, OPTIONS go to the command, by default --keep
0.25 with the refit. Aims on 2 cores: Mixtral 5 minutes and 8 GB, DeepSeekMoE 2 minutes, an objective within 0.1 % of
the exact one.

Of planted layers the least objective is that of the planted orders. For independent ones `--exact` makes the alignment
again with exact searches among all pairs in float64 (annealed where that is the default for small clouds), which takes
minutes each, but not of Mixtral's whole layer, for which a round is expected to take half an hour or more.

`--calibrated` measures methods that look at what experts are given: planted layers of Mixtral-8x7B, Qwen3-30B-A3B and
of the shape of DeepSeek-V3 (width 7168, a quarter of its 256 experts of 2048 neurons, each given as many tokens as if
all were there), on a text of 8192 words that are drawn alike. The recording of the text, which all methods share, is
measured alone. With `--processes`, a model of as many such layers is compressed by as many processes together. Aims on
2 cores: GPTQ of a layer of Mixtral 6 minutes and 8 GB, `allocate` 12 minutes, MoBE 20 minutes, for which it has few
steps. Beside minutes stand those of all threads on the processor, which say more where a machine is shared.

`--compile` compiles the jitted programs of these methods at Mixtral's size, for which the compiler of such a device has
to be there but no device, and states the least time of each. All else runs on the host, in NumPy and SciPy.

OUT receives `true_layers.json`, row by row; rows that are there are not measured again, but for those of programs.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from evidence.layouts import TRUE_EXACT, TRUE_LAYERS, TRUE_PROGRAMS
from evidence.results import RESULTS, Figures
from moe_jax.compression.alignment import matching
from moe_jax.compression.alignment.barycenter import free_support_barycenter
from moe_jax.compression.source_layer import SourceLayer, design_matrices
from moe_jax.model_io.model_dir import ModelDirectory
from true_size.calibrated import CASES, SHAPES, measure_all
from true_size.layers import LAYERS, Shape, planted_objective, write_layer
from true_size.measured import run_command

# Of the exact searches: the last rounds gain some 0.01 % of the objective in all.
EXACT_ROUNDS = 12
# Minutes and GB.
AIMS = {"Mixtral-8x7B": (5, 8), "DeepSeekMoE-16B": (2, None)}
# Where the exact searches end within the hour.
EXACT = {
    "Mixtral-8x7B, an eighth of its neurons and width": Shape(8, 1792, 512),
    "DeepSeekMoE-16B": LAYERS["DeepSeekMoE-16B"],
    "Qwen3-30B-A3B": LAYERS["Qwen3-30B-A3B"],
}


def measure(name: str, shape: Shape, folder: Path, options: list[str], *, planted: bool) -> list:
    """A row: one layer through the command."""
    write_layer(folder / "layer", shape, planted=planted)
    asked = ["--method", "resmoe", *(options or ["--keep", "0.25"]), "--json"]
    measured = run_command("compress", folder / "layer", folder / "out", *asked)
    layer = json.loads(measured.printed.splitlines()[0])
    print(json.dumps(layer, indent=2), flush=True)
    minutes, memory = AIMS.get(name, (None, None))
    return [
        name,
        "planted" if planted else "independent",
        measured.seconds / 60,
        minutes,
        measured.memory / 1e9,
        memory,
        layer["rounds"],
        layer["objective"] / planted_objective(shape) - 1 if planted else None,
    ]


def compare(name: str, shape: Shape, folder: Path) -> list:
    """A row: independent experts of one shape aligned as large clouds are, and by searches among all pairs."""
    write_layer(folder / "layer", shape, planted=False)
    designs = design_matrices(SourceLayer(ModelDirectory(folder / "layer"), 0))
    found, seconds = [], []
    small_up_to = matching._SMALL_ROUND
    for most, rounds in ((0, None), (np.inf, EXACT_ROUNDS)):
        matching._SMALL_ROUND = most
        began = time.monotonic()
        found.append(free_support_barycenter(designs, max_rounds=rounds, solver="assignment"))
        seconds.append(time.monotonic() - began)
    matching._SMALL_ROUND = small_up_to
    mine, exact = found
    return [
        name,
        mine.objective[-1] / exact.objective[-1] - 1,
        seconds[0] / 60,
        mine.rounds,
        seconds[1] / 60,
        exact.rounds,
        mine.duality_gap,
    ]


def measure_alignments(figures: Figures, options: argparse.Namespace) -> None:
    """Measures the rows of `resmoe`, or those of its exact searches."""
    names = options.layers or list(LAYERS)
    table = TRUE_EXACT if options.exact else TRUE_LAYERS
    cases = [(name, shape, False) for name, shape in EXACT.items() if name.split(",")[0] in names]
    if not options.exact:
        cases = [(name, LAYERS[name], planted) for name in names if name in LAYERS for planted in (True, False)]
    for name, shape, planted in cases:
        key = f"{name}, {'planted' if planted else 'independent'}"
        if figures.get("rows", table.name, key) is not None:
            continue
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            if options.exact:
                row = compare(name, shape, folder)
            else:
                row = measure(name, shape, folder, options.options, planted=planted)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        figures.put_row(table.name, key, row)
        print(table.text(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = list(dict.fromkeys([*LAYERS, *SHAPES]))
    parser.add_argument("--layers", nargs="+", choices=known, metavar="NAME", help="by default all that a table has")
    parser.add_argument("--exact", action="store_true", help="compare with exact searches instead")
    parser.add_argument("--calibrated", action="store_true", help="methods that look at inputs of experts instead")
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="NAME", default=list(CASES), help="of these")
    parser.add_argument("--processes", type=int, default=1, help="that share as many layers of a model; with these")
    parser.add_argument("--compile", nargs="+", metavar="TOPOLOGY", help="compile programs for h100:1, v5p:2x2x1, ...")
    parser.add_argument("--folder", type=Path, help="for the models, 10 GB; a temporary one by default")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("options", nargs="*", help="of moe-jax compress")
    options = parser.parse_args()
    figures = Figures("true_layers", options.out, writes=True)
    if options.compile:
        from true_size.programs import rows_for  # with the compilers

        rows = [row for topology in options.compile for row in rows_for(topology)]
        figures.put_rows(TRUE_PROGRAMS.name, rows)
        print(TRUE_PROGRAMS.text(figures))
    elif options.calibrated:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            names = [name for name in options.layers or SHAPES if name in SHAPES]
            measure_all(figures, Path(folder), names, options.cases, processes=options.processes)
    else:
        measure_alignments(figures, options)


if __name__ == "__main__":
    main()
