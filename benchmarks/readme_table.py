"""Writes the table of the README, as `make demo` prints it, from what `benchmarks/demo.py` measured.

python benchmarks/readme_table.py [--out README.md]
"""

import argparse
import io
import math
import re
from pathlib import Path

import rich.console

from demo import IN_ALL
from evidence.layouts import DEMO_MODELS, DEMO_STEPS
from evidence.results import Figures
from evidence.stamp import ROOT
from moe_jax.demo.comparison import Row, comparison_table, summary_of, times_of

README = ROOT / "README.md"
_BLOCK = re.compile(r"(?<=```text\n).*?(?=```\n)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=README, help="file whose first printed block is replaced")
    options = parser.parse_args()
    text = options.out.read_text(encoding="utf-8")
    options.out.write_text(_BLOCK.sub(lambda _: block(Figures("demo")), text, count=1), encoding="utf-8")


def block(figures: Figures) -> str:
    """The table, and the two lines under it."""
    rows = [_row(cells) for cells in figures.rows(DEMO_MODELS.name)]
    printed = io.StringIO()
    rich.console.Console(file=printed, width=80).print(comparison_table(rows))
    whole, small = next(row for row in rows if row.expert_bytes is not None), rows[-1]
    seconds = {step: took for step, took in figures.rows(DEMO_STEPS.name) if step != IN_ALL}
    table = "\n".join(line.rstrip() for line in printed.getvalue().splitlines())
    return f"{table}\n{summary_of(whole, small)}\n{times_of(seconds)}\n"


def _row(cells: list) -> Row:
    name, params, megabytes, of_experts, bits, perplexity, _ = cells
    expert_bytes = None if of_experts is None else round(of_experts * 1e6)
    return Row(name, params, round(megabytes * 1e6), expert_bytes, bits, perplexity, math.log(perplexity), 0)


if __name__ == "__main__":
    main()
