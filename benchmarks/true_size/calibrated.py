"""Methods that look at what experts are given, on layers of true shapes: from a text to the files."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from evidence.layouts import TRUE_CALIBRATED
from evidence.results import Figures
from true_size.layers import LAYERS, Shape, write_layer, write_words
from true_size.measured import Measured, run_command, run_program

TOKENS, WINDOW = 8192, 1024
SHAPES = {name: LAYERS[name] for name in ("Mixtral-8x7B", "Qwen3-30B-A3B")} | {
    "DeepSeek-V3": Shape(64, 2048, 7168, of_experts=256),
}


class Case(NamedTuple):
    """A method, or a recording of its text.

    Attributes:
      options: of `moe-jax compress`; of a recording, of `calibrate`.
      records: whether it is a recording.
      minutes, memory: aims, in minutes and GB, by the name of a layer.
    """

    options: tuple[str, ...]
    records: bool = False
    minutes: dict[str, float] = {}
    memory: dict[str, float] = {}


CALIBRATED = ("--calibrate", "words.txt")
CASES = {
    "recording": Case((), records=True),
    "recording, sensitivities": Case(("sensitivities",), records=True),
    "recording, squared gradients": Case(("gradients",), records=True),
    "GPTQ, 4 bits": Case(("--method", "quantize", "--bits", "4", *CALIBRATED), minutes={"Mixtral-8x7B": 6},
                         memory={"Mixtral-8x7B": 8}),
    "GPTQ, 4 bits, squared gradients": Case(("--method", "quantize", "--bits", "4", *CALIBRATED, "--gradients")),
    "allocate, 2.5 bits": Case(("--method", "allocate", "--budget-bits", "2.5", *CALIBRATED),
                               minutes={"Mixtral-8x7B": 12}),
    "joint factors, a quarter": Case(("--method", "svd", "--keep", "0.25", *CALIBRATED)),
    "MoBE, a quarter, 20 steps": Case(("--method", "mobe", "--keep", "0.25", "--steps", "20"),
                                      minutes={"Mixtral-8x7B": 20}),
}  # fmt: skip

# A recording is a part of commands that take a text; alone it is a call.
_RECORD = """
import sys
from pathlib import Path
from moe_jax.api.compress import calibrate
from moe_jax.api.model import open_model
folder, more = Path(sys.argv[1]), dict.fromkeys(sys.argv[2:], True)
calibrate(open_model(folder / "layer"), folder / "words.txt", place=(folder / "recorded").joinpath, **more)
"""


def measure_all(figures: Figures, place: Path, names: list[str], cases: list[str], *, processes: int = 1) -> None:
    """Measures rows that are not there yet, one layer after another, in an empty folder.

    Args:
      figures: that rows are written to.
      place: of the models.
      names: of layers.
      cases: of what is done with each, in the order of `CASES`.
      processes: that share a model of as many layers, instead of one layer.
    """
    for name in names:
        left = [case for case in CASES if case in cases and not _known(figures, name, case, processes)]
        if not left:
            continue
        folder = place / "true layers"
        try:
            write_layer(folder / "layer", SHAPES[name], planted=True, layers=processes)
            write_words(folder / "words.txt", TOKENS)
            if left[0] != "recording":
                _measure(folder, CASES["recording"])
            for case in left:
                measured = _measure(folder, CASES[case], processes=processes)
                figures.put_row(
                    TRUE_CALIBRATED.name, _key(name, case, processes), _row(name, case, measured, processes)
                )
                print(TRUE_CALIBRATED.text(figures), flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _measure(folder: Path, case: Case, *, processes: int = 1) -> Measured:
    if case.records:
        return run_program("-c", _RECORD, folder, *case.options)
    out = folder / "out"
    options = [str(folder / one) if one == "words.txt" else one for one in case.options]
    kept = ["--calibration-dir", folder / "recorded"] if "--calibrate" in options else []
    try:
        return run_command("compress", folder / "layer", out, *options, *kept, "--json", processes=processes)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _row(name: str, case: str, measured: Measured, processes: int) -> list[Any]:
    shape, aims = SHAPES[name], CASES[case]
    of_all = (shape.of_experts or shape.experts) / shape.experts
    layer = {} if aims.records else json.loads(measured.printed.splitlines()[0])
    aims = aims if processes == 1 else aims._replace(minutes={}, memory={})
    return [
        _title(name, processes),
        case,
        measured.seconds / 60,
        aims.minutes.get(name),
        measured.processor / 60,
        measured.seconds / 60 * of_all if of_all > 1 else None,
        measured.memory / 1e9,
        aims.memory.get(name),
        layer["bytes"] / 1e9 if layer else None,
        layer.get("output_error"),
    ]


def _title(name: str, processes: int) -> str:
    shape = SHAPES[name]
    some = f", {shape.experts} of {shape.of_experts} experts" if shape.of_experts else ""
    return f"{name}{some}" + (f", {processes} layers in {processes} processes" if processes > 1 else "")


def _key(name: str, case: str, processes: int) -> str:
    return f"{_title(name, processes)}, {case}"


def _known(figures: Figures, name: str, case: str, processes: int) -> bool:
    return figures.get("rows", TRUE_CALIBRATED.name, _key(name, case, processes)) is not None
