"""Quality of tuning with few parameters: PESC against dense tuning and vanilla upcycling, PERFT against LoRA.

    python benchmarks/peft_quality.py DATA [--seeds 3] [--work WORK] [--out benchmarks/results]

DATA is a folder with `weights/stories260K/hf`, `text/tinyshakespeare/input.txt`, and for the second part
`text/tinystories/tinystories_sample_2MiB.txt`, `eval/gsm8k/{train,test}.jsonl` and `text/wikitext2/{valid,test}.txt`.

1. stories260K is tuned to TinyShakespeare as it is, as a vanilla MoE, and as PESC's with the rest of the model trained
   in every way; all for as many steps, and within a seed with the same batches.
2. stories260K becomes a trained MoE, one for every seed (8 experts, top-2, tuned to TinyStories and TinyShakespeare;
   kept in WORK), and is tuned to other domains (`--domains`; code: the standard library of this Python) with
   PERFT-R, E, D and S over ranks and numbers of adapters, LoRA on q and v, and LoRA on the router.

OUT receives `peft_quality.json` (every number), `peft_quality.md` (tables, and what they say about what the papers say)
and `peft_quality_*.png`. Each run is kept in the JSON as soon as it is done: a benchmark that was killed goes on where
it was when it is started again. `--report-only` draws tables and plots from the JSON alone; `--quick` does a few runs
of two steps, to see that everything works. It takes about an hour on two CPU threads.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from quality.arguments import quality_parser
from tuning.results import Results
from tuning.settings import QUICK, Settings
from tuning.texts import DOMAINS

_PARTS = ("upcycled", "tuned")
_QUICK_RUNS = {"upcycled": ["dense", "PESC 8, rest QLoRA"], "tuned": ["PERFT-R 8/2 r=8", "LoRA q,v r=8"]}


def main() -> None:
    parser = quality_parser(__doc__, "peft_quality", "the trained MoEs, some 10 MB, and of texts")
    parser.add_argument("--parts", nargs="+", metavar="PART", choices=_PARTS, default=list(_PARTS), help="only these")
    parser.add_argument("--domains", nargs="+", metavar="DOMAIN", choices=DOMAINS, default=["code", "wikitext"],
                        help=f"of {', '.join(DOMAINS)} (default code wikitext)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a few runs of two steps; --out must be another folder")
    options = parser.parse_args()
    settings = QUICK if options.quick else Settings()
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / "peft_quality.json", None if options.report_only else settings)
    if not options.report_only:
        _measure(options, results)

    from tuning.report import write_report

    print(write_report(results, options.out))


def _measure(options: argparse.Namespace, results: Results) -> None:
    """Does what is not in the results yet."""
    import jax

    from tuning.bases import train_bases
    from tuning.parts import tuned_part, upcycled_part
    from tuning.task import Task

    task = Task(options.data, options.work, results.settings, seeds=range(options.seeds))
    # A benchmark that goes on later need not compile anything again.
    jax.config.update("jax_compilation_cache_dir", str(options.work / "compiled"))
    parts = {}
    if "upcycled" in options.parts:
        parts["upcycled"] = upcycled_part(task)
    if "tuned" in options.parts:
        train_bases(task, results, tuple(options.domains))
        parts["tuned"] = tuned_part(task, options.domains)
    for name, part in parts.items():
        part.measure(results, _QUICK_RUNS[name] if options.quick else None)


if __name__ == "__main__":
    main()
