"""Which compressed experts are best at equal bytes: every method, on models of several origins.

    python benchmarks/equal_bytes.py DATA --work WORK [--smollm MODEL] [--minutes N] [--only MODEL ...]

DATA and MODEL are those of `claims.py`. The models are trained as they are there, with the rates that were chosen
there, and kept in WORK; SmolLM2's takes an hour with two threads. It can be stopped at any moment; the same command
goes on. All results of a model are of the same bits: one that is lost must be the same when it is made again, which
another kind of machine cannot do; there, choose another --out. Calibration, selection and test texts are apart.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from evidence.equal_bytes.own_models import adopt, own_models
from evidence.equal_bytes.plan import comparisons
from evidence.equal_bytes.report import opened, write_report
from evidence.results import RESULTS
from evidence.studies.claims_file import ClaimsFile
from evidence.studies.jobs import DiffersError, NotFiniteError, Place, do_jobs
from moe_jax.commands.environment import ask_for_huge_pages
from moe_jax.core.errors import InputError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--work", type=Path, required=True, help="folder of kept models")
    parser.add_argument("--smollm", type=Path, help="folder of SmolLM2-135M")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="only these models")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no job after so many")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="jobs at a time (default %(default)s)")
    parser.add_argument("--report-only", action="store_true", help="run nothing, write the tables and the picture")
    options = parser.parse_args()
    try:
        for folder in filter(None, (options.data, options.smollm)):
            if not folder.is_dir():
                raise FileNotFoundError(f"there is no folder {folder}")
        place = Place(options.data.resolve(), options.work.resolve(), options.smollm and options.smollm.resolve())
        chosen = comparisons()
        known = [study.subject.label for study in chosen]
        if unknown := set(options.only or ()) - set(known):
            raise InputError(f"there is no model {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        chosen = [study for study in chosen if not options.only or study.subject.label in options.only]
        options.out.mkdir(parents=True, exist_ok=True)
        results = opened(options.out)
        if not options.report_only:
            models = own_models([study.subject for study in chosen], place, ClaimsFile(RESULTS))
            adopt(models, results, place)
            done = do_jobs([*models, *chosen], results, place, workers=options.workers, minutes=options.minutes)
            print("nothing is left to do" if done else "stopped; the same command goes on")
        print(write_report(results, options.out))
    except (FileNotFoundError, InputError, NotFiniteError, DiffersError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    ask_for_huge_pages()
    main()
