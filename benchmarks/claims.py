"""What the papers claim, tested on models that were really trained: the evidence behind the table of claims.

    python benchmarks/claims.py DATA [--smollm MODEL] [--only NAME ...] [--minutes N] [--repeat N]

DATA is a folder with `weights/stories260K/hf`, `text/{tinyshakespeare,tinystories,wikitext2}` and `eval/gsm8k`; the
code is the standard library of this Python. Without `--smollm`, the studies of SmolLM2-135M are left out.

The plan (`evidence/studies/plan.py`) takes about ten hours on two cores. It can be stopped at any moment: every result
is written to OUT/claims.json when it is there, and the same command goes on. Models that others start from are kept
in WORK. One that is lost is made again if something begins with it that is not done yet, with `--models` in any case;
its results must be the same, bit for bit, so that another kind of machine cannot do that. `--repeat N` does N finished
jobs again and says whether they gave the same bits; `--report-only` runs nothing and writes the tables and pictures of
what there is.
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# One thread for every worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from evidence.results import RESULTS
from evidence.studies.claims_file import ClaimsFile
from evidence.studies.jobs import DiffersError, NotFiniteError, Place, do_jobs, repeat_jobs
from evidence.studies.plan import studies
from evidence.studies.report import write_report
from moe_jax.commands.environment import ask_for_huge_pages
from moe_jax.core.errors import InputError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--smollm", type=Path, help="folder of SmolLM2-135M")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    work = Path(tempfile.gettempdir()) / "moe_jax_claims"
    parser.add_argument("--work", type=Path, default=work, help="folder of kept models (default %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these studies, or all of these scales")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no job after so many")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="jobs at a time (default %(default)s)")
    parser.add_argument("--repeat", type=int, metavar="N", help="do N finished jobs again, and compare the bits")
    parser.add_argument("--models", action="store_true", help="make every kept model again that is not there")
    parser.add_argument("--report-only", action="store_true", help="run nothing, write tables and pictures")
    options = parser.parse_args()
    try:
        _run(options)
    except (FileNotFoundError, InputError, NotFiniteError, DiffersError) as error:
        parser.error(str(error))


def _run(options: argparse.Namespace) -> None:
    for folder in filter(None, (options.data, options.smollm)):
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
    place = Place(options.data.resolve(), options.work.resolve(), options.smollm and options.smollm.resolve())
    chosen = studies(place)
    names = dict.fromkeys(name for study in chosen for name in (study.name, study.scale_name))
    if unknown := set(options.only or ()) - set(names):
        raise InputError(f"there is no study or scale {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    options.out.mkdir(parents=True, exist_ok=True)
    results = ClaimsFile(options.out)
    chosen = [study for study in chosen if not options.only or {study.name, study.scale_name} & set(options.only)]
    if not options.report_only:
        results.check_texts(place.data)
    if options.repeat:
        count, differ = repeat_jobs(chosen, results, place, workers=options.workers, count=options.repeat)
        print(f"{count} jobs done again, {len(differ)} with another result", *map(" / ".join, differ), sep="\n")
    elif not options.report_only:
        done = do_jobs(
            chosen, results, place, workers=options.workers, minutes=options.minutes, all_models=options.models
        )
        print("nothing is left to do" if done else "stopped; the same command goes on")
    print(write_report(results, options.out))


if __name__ == "__main__":
    ask_for_huge_pages()
    main()
