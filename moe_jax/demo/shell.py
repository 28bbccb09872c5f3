"""The shell of a demo: commands, typed and run."""

import contextlib
import io
import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import rich.console
from rich.markup import escape

from moe_jax.api.train import run_recipe
from moe_jax.core.errors import InputError
from moe_jax.training.recipe import load_recipe


class Shell:
    """Runs commands: shows each on the console as a user would type it, and stops at the first that fails.

    Args:
      console: where commands are shown, and the demo's own output.
      run: runs a command, given its words without the program's name; returns its exit code, and raises its errors.
      again: the command that goes on with the demo.
      resume: whether this demo goes on with one that was stopped.
    """

    def __init__(
        self,
        console: rich.console.Console,
        run: Callable[[list[str]], int],
        *,
        again: str = "moe-jax demo --resume",
        resume: bool = False,
    ):
        self.console, self.again, self.resume, self._command = console, again, resume, run

    def type(self, *words: object) -> None:
        """Runs a command that prints what it does."""
        self._run(self._typed(words))

    def show(self, program: str, *words: object) -> None:
        """Shows a command as a user could type it; what it does is done by the caller."""
        typed = shlex.join(map(str, words))
        self.console.print(f"\n[bold]$ {program} {escape(typed)}[/bold]", highlight=False, soft_wrap=True)

    def make(self, out: Path, *words: object) -> None:
        """Runs a command that makes `out`, which is complete once it is there: then there is nothing left to do.

        A command that was stopped before goes on where it was, for the words are the same.
        """
        if out.exists():
            self.console.print(f"{out} is there", highlight=False, markup=False)
        else:
            self.type(*words)

    def train(self, recipe: Path, run: Path, *overrides: str) -> None:
        """Runs `train`, unless the model of its run directory `run` is there.

        Raises:
          Stopped: after a signal, when a checkpoint is on the disk.
        """
        if (run / "model").exists():
            self.console.print(f"{run / 'model'} is there", highlight=False, markup=False)
            return
        goes_on = self.resume and run.exists()
        self._typed(["train", recipe, *(["--set", *overrides] if overrides else []), *(["--resume"] * goes_on)])
        run_recipe(load_recipe(recipe, overrides), resume=goes_on, continue_command=self.again)

    def json(self, *words: object, shows: bool = True) -> Any:
        """Runs a command that prints JSON, and returns that; `shows`: it is printed here, too."""
        arguments, printed = self._typed(words), io.StringIO()
        with contextlib.redirect_stdout(printed):
            self._run(arguments)
        if shows:
            self.console.print(printed.getvalue().strip(), highlight=False, soft_wrap=True, markup=False)
        return json.loads(printed.getvalue())

    @contextlib.contextmanager
    def notes(self) -> Iterator[None]:
        """Adds to what ends the block, an interruption or an error of a user, how the demo goes on."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"the demo goes on with: {self.again}")
            raise

    def _run(self, arguments: list[str]) -> None:
        if self._command(arguments):
            raise InputError(f"the demo stopped: moe-jax {arguments[0]} failed, for the reason above")

    def _typed(self, words: Iterable[object]) -> list[str]:
        arguments = [str(word) for word in words]
        self.show("moe-jax", *arguments)
        return arguments
