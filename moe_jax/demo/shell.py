"""The folder of a demo, and its shell: commands, typed and run."""

import contextlib
import io
import json
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.table
from rich.markup import escape

from moe_jax.api.train import run_recipe
from moe_jax.core.errors import InputError
from moe_jax.training.recipe import load_recipe

# A folder with this file was made by a demo, and another demo may replace it.
MARKER = ".made-by-moe-jax-demo"


def make_folder(folder: Path) -> None:
    """Makes an empty folder; one that an earlier demo made is replaced, `InputError` if it holds something else."""
    if folder.exists():
        if not (folder / MARKER).is_file():
            raise InputError(f"{folder} exists and was not made by a demo; choose another --dir")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()


def comparison(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> rich.table.Table:
    """A table with one row per model, whose name is in the first column."""
    table = rich.table.Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        table.add_row(*row)
    return table


class Shell:
    """Runs commands by `main`: shows each on the console as a user would type it, and stops at the first that fails."""

    def __init__(self, console: rich.console.Console, main: Callable[[list[str]], int]):
        self.console, self._main = console, main

    def type(self, *words: object) -> None:
        """Runs a command that prints what it does."""
        self._run(self._typed(words))

    def train(self, recipe: Path, *overrides: str) -> None:
        """Runs `train`. A signal that ends the training ends the demo, too: there is no model to go on with.

        Raises:
          Stopped: after such a signal, when a checkpoint is on the disk.
        """
        words = ["train", recipe, *(["--set", *overrides] if overrides else [])]
        again = shlex.join(["moe-jax", *map(str, words), "--resume"])
        self._typed(words)
        run_recipe(load_recipe(recipe, overrides), continue_command=again)

    def json(self, *words: object, shows: bool = True) -> Any:
        """Runs a command that prints JSON, and returns that; `shows`: it is printed here, too."""
        arguments, printed = self._typed(words), io.StringIO()
        with contextlib.redirect_stdout(printed):
            self._run(arguments)
        if shows:
            self.console.print(printed.getvalue().strip(), highlight=False, soft_wrap=True, markup=False)
        return json.loads(printed.getvalue())

    def _typed(self, words: Iterable[object]) -> list[str]:
        arguments = [str(word) for word in words]
        self.console.print(f"\n[bold]$ moe-jax {escape(shlex.join(arguments))}[/bold]", highlight=False, soft_wrap=True)
        return arguments

    def _run(self, arguments: list[str]) -> None:
        if self._main(arguments) != 0:
            raise InputError(f"the demo stopped: moe-jax {arguments[0]} failed, for the reason above")
