"""The models of a demo side by side: what is measured of each, as a table, and as JSON that tables are made from."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.box
import rich.table

import moe_jax
from moe_jax.api.open_source import open_source
from moe_jax.core.formatting import show_bytes, show_duration
from moe_jax.demo.folder import Steps, is_number
from moe_jax.demo.shell import Shell
from moe_jax.peft.trained import parameter_sizes

RESULTS = "results.json"
"""The file of a comparison, in the folder of its demo."""


class Way(NamedTuple):
    """One way to compress the experts, or the whole model.

    Attributes:
      name: of the model that it makes, in tables and pictures.
      folder: where that model lies, in the folder of the demo.
      options: of `moe-jax compress`.
      calibrated: whether it is given the calibration text, too.
    """

    name: str
    folder: str
    options: str
    calibrated: bool


BUDGET = 3.2
"""Bits per weight of the model that `allocate` is given: a fifth of bfloat16."""
WAYS = (
    Way("4 bits", "4-bit", "--method quantize --bits 4", False),
    Way("4 bits, GPTQ", "gptq", "--method quantize --bits 4", True),
    # The experts are copies of one FFN, whose neurons have kept their order.
    Way(
        f"whole model, {BUDGET:g} bits",
        "whole",
        f"--method allocate --of model --budget-bits {BUDGET:g} --solver identity",
        True,
    ),
)
"""The last of them is the one whose answers are shown."""


def compress_in_all_ways(shell: Shell, model: Path, folder: Path, calibration: Sequence[object]) -> dict[str, Path]:
    """Compresses a model in all `WAYS`, with `calibration`, options of a text, where they need one.

    Returns the smaller models by their names.
    """
    made = {}
    for way in WAYS:
        made[way.name] = folder / way.folder
        options = [*way.options.split(), *(calibration if way.calibrated else ())]
        shell.make(made[way.name], "compress", model, made[way.name], *options)
    return made


@dataclasses.dataclass(frozen=True)
class Row:
    """One model, named by what was done to it.

    Attributes:
      name: of the model.
      params: numbers that the model has; codes stand for as many as they were made of.
      nbytes: of all weights on the disk.
      expert_bytes: of the experts of its MoE layers, with what they share; None: it is dense.
      expert_bits: per weight of these experts, everything included; None: it is dense.
      perplexity: of the held-out text. nll: its logarithm, nats per token. tokens: that were scored.
    """

    name: str
    params: int
    nbytes: int
    expert_bytes: int | None
    expert_bits: float | None
    perplexity: float
    nll: float
    tokens: int


COLUMNS = ("model", "parameters", "bytes", "experts", "bits/weight", "perplexity")


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a row under `COLUMNS`."""
    experts = ("", "") if row.expert_bytes is None else (show_bytes(row.expert_bytes), f"{row.expert_bits:.3g}")
    return (row.name, f"{row.params:,}", show_bytes(row.nbytes), *experts, f"{row.perplexity:.3f}")


def comparison_table(rows: Iterable[Row]) -> rich.table.Table:
    """A table with a row for every model, for a terminal of 80 columns."""
    return console_table(COLUMNS, map(cells, rows))


def console_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> rich.table.Table:
    """A table for a terminal, of which the first column names the row."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    return table


def summary_of(whole: Row, small: Row) -> str:
    """Says in a line how much a model saves and loses that was compressed."""
    return (
        f"{small.name}: {show_bytes(whole.nbytes)} became {show_bytes(small.nbytes)} "
        f"({small.nbytes / whole.nbytes:.0%}), and the held-out perplexity changed by "
        f"{small.perplexity / whole.perplexity - 1:+.1%}"
    )


def times_of(seconds: Mapping[str, float]) -> str:
    """Says in a line how long every step took."""
    return "time: " + ", ".join(f"{title} {show_duration(took)}" for title, took in seconds.items())


def measured_row(name: str, model: Path, scored: Mapping[str, Any], *, whole: Path) -> Row:
    """Makes the row of a model.

    Args:
      name: of the model.
      model: its directory.
      scored: by `moe-jax eval --json`.
      whole: the same model with experts that are not in codes, whose numbers are counted.
    """
    sizes = parameter_sizes(open_source(whole).config)
    weights = sum(size for path, size in sizes.items() if _of_experts(path))
    stored = stored_bytes(model)
    return Row(
        name=name,
        params=sum(sizes.values()),
        nbytes=stored.model,
        expert_bytes=stored.experts,
        expert_bits=None if stored.experts is None else 8 * stored.experts / weights,
        perplexity=scored["perplexity"],
        nll=scored["nll"],
        tokens=scored["tokens"],
    )


class Stored(NamedTuple):
    """Bytes on the disk: of the model, and of its experts with what they share; None: it is dense."""

    model: int
    experts: int | None


def stored_bytes(model: Path) -> Stored:
    """Counts the bytes of a model's weights."""
    source = open_source(model)
    stored = {path: source.stored_bytes(path) for path in source.specs()}
    of_experts = [size for path, size in stored.items() if _of_experts(path)]
    return Stored(sum(stored.values()), sum(of_experts) if of_experts else None)


def _of_experts(path: str) -> bool:
    """Whether a leaf is of experts, or of what they share."""
    return "/mlp/experts/" in path


def score(shell: Shell, done: Steps, name: str, model: Path, eval_options: Sequence[object]) -> dict[str, Any]:
    """Returns what `eval` says of a model, kept under a name, so that a demo that goes on need not score it again.

    Args:
      eval_options: the held-out text, and how it is read.
    """

    def is_score(kept: Any) -> bool:
        if not isinstance(kept, dict) or not all(is_number(kept.get(key)) for key in ("perplexity", "nll", "tokens")):
            return False
        return kept["perplexity"] > 0

    return done.kept(f"score of {name}", lambda: shell.json("eval", model, *eval_options, "--json"), is_score)


def score_all(shell: Shell, done: Steps, models: Mapping[str, Path], eval_options: Sequence[object]) -> list[Row]:
    """Scores models by their names, the dense one first and the one that was compressed second."""
    rows = []
    dense, whole, *_ = models
    for name, model in models.items():
        scored = score(shell, done, name, model, eval_options)
        rows.append(measured_row(name, model, scored, whole=models[dense if name == dense else whole]))
    return rows


def write_results(folder: Path, rows: Sequence[Row], seconds: Mapping[str, float], **about: Any) -> None:
    """Writes `RESULTS`: `rows` and `seconds`, by the steps of the demo, and what it was about."""
    made = about | {
        "version": moe_jax.__version__,
        "seconds": dict(seconds),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    (folder / RESULTS).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def read_results(folder: Path) -> dict[str, Any]:
    """Reads what `write_results` wrote; `rows` are `Row`s."""
    found = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    return found | {"rows": [Row(**row) for row in found["rows"]]}
