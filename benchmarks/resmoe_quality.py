"""Quality of ResMoE and of the methods it is compared with, on MoEs that were really trained.

    python benchmarks/resmoe_quality.py DATA [--seeds 3] [--work WORK] [--out benchmarks/results]

DATA is a folder with `weights/stories260K/hf` and `text/tinyshakespeare/input.txt`; the last tenth of the text is held
out. Trained are MoEs of stories260K's shape (top-2, in every layer): upcycled from it, and from random weights, whose
experts have nothing in common, with 8 experts and, from random weights, with 4. Every model is kept in WORK/models and
is trained once. All are stored in bfloat16, compressed by every method and at every kept share of `resmoe/variants.py`,
and scored.

OUT receives `resmoe_quality.json` (every number), `resmoe_quality.md` (the tables, and what they say about what was
expected) and `resmoe_quality_*.png`. Each run is kept in the JSON as soon as it is done: a benchmark that was killed
goes on where it was when it is started again. `--report-only` draws tables and plots from the JSON alone. It takes
about an hour on two CPU threads, half of it training.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The matrices of these experts are too small for two threads, which would only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from quality.arguments import quality_parser
from resmoe.results import Results
from resmoe.settings import ORIGINS, Settings
from resmoe.variants import VARIANTS


def main() -> None:
    parser = quality_parser(__doc__, "resmoe_quality", "the trained models, some 100 MB")
    parser.add_argument("--origins", nargs="+", metavar="ORIGIN", choices=ORIGINS, default=list(ORIGINS))
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--again",
        nargs="*",
        metavar="VARIANT",
        choices=VARIANTS,
        help="of --origins, measure these variants again, with the models in WORK, which must be those of the results; "
        "without any all of them, and the models as well",
    )
    parser.add_argument("--training-only", action="store_true", help="compress nothing")
    options = parser.parse_args()
    settings = Settings()
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / "resmoe_quality.json", None if options.report_only else settings)
    if not options.report_only:
        from resmoe.training import Task, train_models

        task = Task(options.data, options.work, settings, seeds=range(options.seeds))
        origins = [ORIGINS[name] for name in options.origins]
        train_models(task, origins)
        if not options.training_only:
            from resmoe.compression import compress_models, describe_models

            for origin in options.origins if options.again is not None else ():
                for variant in options.again or VARIANTS:
                    results.forget("compression", origin, variant)
                if not options.again:
                    results.forget("models", origin)
            describe_models(task, results, origins)
            compress_models(task, results, origins, options.variants)

    from resmoe.report import write_report

    print(write_report(results, options.out))


if __name__ == "__main__":
    main()
