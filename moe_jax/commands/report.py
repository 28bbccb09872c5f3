"""`moe-jax report PATH...`: one HTML page about models, runs, compressions and evaluations."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from moe_jax.commands.options import check_model
from moe_jax.core.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Writes one HTML page about models, training runs, compressions and evaluations, with several side by side.

    The page is one file that needs no network and runs no script. It shows how models were made, what they consist of,
    the curves of runs, how experts are used and how similar they are, what compression did, and evaluations.
    """

    made: ClassVar[tuple[str, ...]] = ("out",)

    paths: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="PATH...", help_behavior_hint="(one or more)")
    ]
    """A model (directory, adapter directory, Hugging Face directory, GGUF file, RUN@STEP), the directory of a training
    run, a folder of compress --sweep or of inspect --plots, or the JSON of eval (--json, --output) or lm-eval. An
    evaluation of one of the models is shown with it."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("report.html")
    """The page; must not exist."""
    no_weights: bool = False
    """Reads no weights: without how similar experts are. That reads all experts, one matrix of a layer at a time."""
    base: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: where it was)")] = None
    """The present path of the model that an adapter directory or a checkpoint among the PATHs needs, if it moved."""

    def check(self) -> None:
        """Raises `InputError` if no path is given."""
        if not self.paths:
            raise InputError("missing: PATH; see moe-jax report --help")

    def check_places(self) -> None:
        """Raises an error if a path is not there."""
        for path in self.paths:
            if path.suffix != ".json":
                check_model(path)


EXAMPLES = """
moe-jax report run --out run.html
moe-jax report dense-dir run small-dir results.json --out compared.html
moe-jax report mixtral-dir --no-weights
"""


def run(options: Options) -> None:
    """Writes the page."""
    from moe_jax.core.formatting import show_bytes
    from moe_jax.core.terminal import progress_bars
    from moe_jax.report.build import write_report

    with progress_bars() as progress:
        nbytes = write_report(
            options.paths, options.out, base=options.base, weights=not options.no_weights, progress=progress
        )
    print(f"wrote {options.out} ({show_bytes(nbytes)})")
