"""Whole models at equal bytes: `compress --of model` beside llm-compressor's GPTQ and AWQ and llama.cpp's K-quants.

    python benchmarks/whole_models.py DATA --work WORK [--models NAME[=MODEL] ...] [--llmc PYTHON]
        [--only ENTRY ...] [--draws 3] [--questions 1000] [--minutes N] [--out benchmarks/results]

DATA is the folder of texts that `claims.py` describes. MODEL is a model directory or a Hugging Face directory, dense or
a Mixture-of-Experts; the small ones, stories260K-MoE and Llama-d256-MoE, are made in WORK, and so is all that is kept.
The MoE of SmolLM2-135M is the one that `four_bits.py` keeps. PYTHON is that of an environment with llm-compressor
(`pip install llmcompressor`); the package llama-cpp-python is built from source. Everything is calibrated with as many
windows of WikiText-2's validation set, and read and scored by this library in float32, on texts of three kinds that
nothing was calibrated with. It can be stopped at any moment; the same command goes on. OUT receives
`whole_models.json`, `whole_models.md` and `whole_models.png`.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from evidence.results import RESULTS
from evidence.whole_models.entries import BY_LABEL
from evidence.whole_models.report import write_report
from evidence.whole_models.small_models import MADE
from evidence.whole_models.study import WholeModelsFile, do_entries
from evidence.whole_models.task import DRAWS, Task
from moe_jax.commands.environment import ask_for_huge_pages, keep_compiled_programs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--work", type=Path, required=True, help="folder of what is kept between entries")
    parser.add_argument("--models", nargs="+", default=list(MADE), metavar="NAME[=MODEL]", help="(default: the small)")
    parser.add_argument("--llmc", type=Path, metavar="PYTHON", help="of the environment with llm-compressor")
    parser.add_argument("--only", nargs="+", choices=list(BY_LABEL), metavar="ENTRY", help="only these")
    parser.add_argument("--draws", type=int, default=len(DRAWS), help="of calibration windows (default %(default)s)")
    parser.add_argument("--questions", type=int, default=0, help="of PIQA and ARC-easy, each (default: none are asked)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no entry after so many")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--report-only", action="store_true", help="run nothing, write the tables and the picture")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    results = WholeModelsFile(options.out, writes=True)
    if not options.report_only:
        tasks = [task(name, options) for name in options.models]
        done = do_entries(tasks, results, only=options.only, draws=options.draws, until=until)
        print("nothing is left to do" if done else "stopped; the same command goes on")
    print(write_report(results, options.out))


def task(named: str, options: argparse.Namespace) -> Task:
    """The task of `NAME` or `NAME=MODEL`; a model that is not given is made, unless it is there."""
    data, work = options.data.resolve(), options.work.resolve()
    name, _, given = named.partition("=")
    if not given and name not in MADE:
        raise SystemExit(f"where is {name}? give {name}=MODEL; made are {', '.join(MADE)}")
    folder = work / name
    made, found = folder / "made", folder / "model"
    folder.mkdir(parents=True, exist_ok=True)
    if not given and not found.exists():
        shutil.rmtree(made, ignore_errors=True)  # of a run that was stopped
        made.mkdir()
        MADE[name](data, made).rename(found)
    return Task(name, Path(given).resolve() if given else found, data, folder, options.llmc, options.questions)


if __name__ == "__main__":
    ask_for_huge_pages()
    keep_compiled_programs()
    main()
