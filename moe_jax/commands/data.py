"""`moe-jax data inspect RECIPE.toml` and `moe-jax data tokenize RECIPE.toml OUT`: training data before training."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro

from moe_jax.commands.options import can_be_read_again, check_recipe
from moe_jax.core.errors import InputError

if TYPE_CHECKING:  # they import JAX, and `--help` should answer without it
    from moe_jax.data.tokenize_sources import Part, Task
    from moe_jax.training.recipe import Recipe

_MOST_SHOWN = 2000  # characters of a document


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Shows what a model learns of the data of a recipe, or tokenises it once, before training.

    inspect: prints the first documents of every source as the model gets them. Unscored parts (prompts, the user's
    words) are dim; in a file or a pipe, scored parts stand between ⟦ and ⟧. A table counts tokens.

    tokenize: writes the tokens of all sources to OUT, array_record files that a recipe names as its sources. Training
    on them gives the same batches without the tokenizer's work. After a kill the same command goes on.
    """

    made: ClassVar[tuple[str, ...]] = ("out",)

    task: Annotated[tyro.conf.Positional[Literal["inspect", "tokenize"]], tyro.conf.arg(metavar="inspect|tokenize")]
    """What to do."""
    recipe: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RECIPE.toml")]
    """The recipe, as moe-jax train takes it; its model is opened for its tokenizer, and not loaded."""
    out: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[OUT]")] = None
    """tokenize: the directory to write, which must not exist."""
    set: Annotated[tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """Overrides keys of the recipe, as in --set data.seq_len=512."""
    examples: int = 3
    """inspect: documents shown of every source."""
    processes: int = 1
    """tokenize: how many processes work."""
    json: bool = False
    """Prints JSON and nothing else."""

    def check(self) -> None:
        """Raises `InputError` for options that do not go together, or are out of range."""
        if (self.task == "tokenize") != (self.out is not None):
            raise InputError("data tokenize RECIPE.toml OUT writes to OUT; data inspect RECIPE.toml writes nothing")
        if self.examples < 0:
            raise InputError(f"--examples {self.examples}: expected a number from 0")

    def check_places(self) -> None:
        """Raises an error if the recipe, or what it names and the command reads, is not there or cannot be read."""
        if can_be_read_again(self.recipe):
            check_recipe(self.load(), trains=False)

    def load(self) -> "Recipe":
        """Returns the recipe with what is set besides; raises `InputError` if it cannot be read."""
        from moe_jax.training.recipe import load_recipe

        return load_recipe(self.recipe, [override for group in self.set for override in group])


EXAMPLES = """
moe-jax data inspect recipe.toml --examples 1
moe-jax data tokenize recipe.toml tokens --processes 8
"""


def run(options: Options) -> None:
    """Runs the task."""
    from moe_jax.api.open_source import open_recipe_model
    from moe_jax.data.tokenize_sources import Task
    from moe_jax.training.training_run import path_of_tokenizer

    recipe = options.load()
    source, config = open_recipe_model(recipe)
    task = Task(recipe.data, config, path_of_tokenizer(recipe, source), recipe.train.batch_size)
    if options.out is None:
        _inspect(task, options)
    else:
        _tokenize(task, options.out, options)


def _inspect(task: "Task", options: Options) -> None:
    from rich.markup import escape
    from rich.table import Table

    from moe_jax.core.terminal import console_for_tables
    from moe_jax.data.sections import input_length
    from moe_jax.data.tokenize_sources import preview

    found = preview(
        task.section, task.config, task.tokenizer_path, batch_size=task.batch_size, count=options.examples
    )  # fmt: skip
    if options.json:
        print(json.dumps([dataclasses.asdict(source) for source in found], indent=2, ensure_ascii=False))
        return
    console = console_for_tables()
    for source in found:
        for number, document in enumerate(source.shown, start=1):
            console.print(f"[bold]--- {escape(source.path)}: document {number} ---[/bold]", soft_wrap=True)
            console.print(_text(document, in_colour=console.is_terminal), soft_wrap=True)
    inputs = f" (inputs: {input_length(task.section)})" if task.config.has_encoder else ""
    caption = f"too long: longer than data.seq_len = {task.section.seq_len}{inputs}, and cut there"
    is_cut = any(source.too_long for source in found)
    table = Table("source", "format", *_COUNTS, caption=caption if is_cut else None)
    if any(source.pictures for source in found):
        table.add_column("pictures")
    for source in found:
        pictures = [f"{source.pictures:,}"] if len(table.columns) > 2 + len(_COUNTS) else []
        table.add_row(escape(source.path), source.form, *(count(source) for count in _COUNTS.values()), *pictures)
    console.print(table)


_COUNTS = {
    "records": lambda source: f"{source.records:,}",
    "tokens, about": lambda source: f"{source.estimated_tokens:,}",
    "scored": lambda source: f"{source.scored / max(source.tokens, 1):.0%}",
    "documents counted": lambda source: f"{source.documents:,}",
    "tokens of the longest": lambda source: f"{source.longest:,}",
    "too long": lambda source: f"{source.too_long:,}",
}


def _text(document: "tuple[Part, ...]", *, in_colour: bool):
    """Returns a document for the console: scored parts in green and the rest dim, or scored parts in brackets."""
    from rich.text import Text

    text, left = Text(), _MOST_SHOWN
    for part in document:
        shown = part.text[:left]
        left -= len(shown)
        if in_colour:
            text.append(shown, "green" if part.scored else "dim")
        else:
            text.append(f"⟦{shown}⟧" if part.scored and shown else shown)
    rest = sum(len(part.text) for part in document) - _MOST_SHOWN
    return text.append(f" ... and {rest:,} characters more", "italic") if rest > 0 else text


def _tokenize(task: "Task", out: Path, options: Options) -> None:
    from moe_jax.core.terminal import progress_bars
    from moe_jax.data.tokenize_sources import source_patterns, tokenize, totals

    with progress_bars() as progress:
        index = tokenize(task, out, processes=options.processes, progress=progress)
    patterns, sums = source_patterns(out, task.section), totals(index)
    if options.json:
        found = [{"path": path, **counts} for path, counts in zip(patterns, sums, strict=True)]
        print(json.dumps(found, indent=2))
        return
    sources = []
    for settings, path, counts in zip(task.section.sources, patterns, sums, strict=True):
        share = f"{counts['scored'] / max(counts['tokens'], 1):.0%}"
        print(f"{settings.path}: {counts['tokens']:,} tokens in {counts['documents']:,} documents, {share} scored")
        weight = "" if settings.weight is None else f", weight = {settings.weight}"
        sources.append(f"{{ path = {json.dumps(path)}{weight} }}")
    print(f"wrote {out}; train on it with\n\n[data]\nsources = [{', '.join(sources)}]")
