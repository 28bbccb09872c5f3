"""Quality of DeRS on a real model: every delta kind trained, and a trained MoE compressed.

    python benchmarks/ders_quality.py DATA [--seeds 3] [--steps 200] [--out benchmarks/results]

DATA is a folder with `weights/stories260K/hf` and `text/tinyshakespeare/input.txt`; the last tenth of the text is held
out. stories260K becomes an MoE (4 experts, top-2, in every layer) of every kind and is tuned to TinyShakespeare; the
dense model is tuned as long. A seed decides the order of the text, the routers, the low-rank factors, the sparse
positions and the entries that compression drops; within a seed every kind sees the same batches. The trained vanilla
models are then compressed (DeRS), once with the dense model from before upcycling as base and once with the mean of
the experts.

OUT receives `ders_quality.json` (every number), `ders_quality.md` (the tables) and `ders_quality_*.png`. Each run is
kept in the JSON as soon as it is done: a benchmark that was killed goes on where it was when it is started again.
`--report-only` draws tables and plots from the JSON alone. It takes about half an hour on two CPU threads.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from ders.results import Results
from ders.settings import BASES, KINDS, METHODS, VANILLA, Settings
from quality.arguments import quality_parser


def main() -> None:
    parser = quality_parser(__doc__, "ders_quality", "the trained models, some MB")
    defaults = Settings()
    parser.add_argument("--steps", type=int, default=defaults.steps, help="(default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size, help="sequences (default %(default)s)")
    parser.add_argument("--seq-len", type=int, default=defaults.seq_len, help="tokens (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate, help="(default %(default)s)")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", choices=KINDS, default=list(KINDS), help="only these")
    parser.add_argument(
        "--compress-again",
        nargs="*",
        metavar="METHOD",
        choices=METHODS,
        help=f"measure these methods again, of {', '.join(METHODS)}; without any all of them and the models they start "
        "from, which need not be those of the training table",
    )
    parser.add_argument("--training-only", action="store_true", help="compress nothing")
    options = parser.parse_args()
    settings = Settings(
        steps=options.steps,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        learning_rate=options.learning_rate,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / "ders_quality.json", None if options.report_only else settings)
    if options.compress_again is not None:
        for base in BASES:
            for method in options.compress_again or METHODS:
                results.forget("compression", base, method)
        if not options.compress_again:
            results.forget("compressed")
    if not options.report_only:
        from ders.training import Task, train_kinds

        task = Task(options.data, options.work, settings, seeds=range(options.seeds))
        train_kinds(task, results, options.kinds)
        if VANILLA in options.kinds and not options.training_only:
            from ders.compression import compress_models

            compress_models(task, results)

    from ders.report import write_report

    print(write_report(results, options.out))


if __name__ == "__main__":
    main()
