"""The walkthroughs in docs/guides/ as programs: files are written and commands run, in the order of the text.

A fenced block is one of these:

- `console`: a line after `$ ` is run, the others are what it prints, in part; `...` ends what is shown of a line.
- `python` or `toml` with its name as a comment in the first line: a file.
- `sh`: for another machine, with a network, or slow. Not run unless that is asked for, but the parsers read every
  `moe-jax` in it.
- anything else is only shown.

    python -m tests.support.walkthroughs docs/guides/tune.md FOLDER smollm=DIR   # what it prints with a real model
"""

import contextlib
import importlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moe_jax.commands.arguments import parse_arguments
from moe_jax.commands.cli import main

_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"# ([\w./-]+\.(?:py|toml|jsonl))\n")
_LINES_OF_TABLES = re.compile(r"[\s│┃─━┌┐└┘├┤┬┴┼┏┓┗┛┡┩╇┳┻]+")


class Block(NamedTuple):
    """A fenced block of a document."""

    kind: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        name = _NAME.match(self.text)
        return name[1] if name and self.kind in ("python", "toml") else None


class Command(NamedTuple):
    """A command, and what a document says that it prints."""

    words: list[str]
    shown: list[str]


class Ran(NamedTuple):
    """What a command did: its exit code, and what it printed on both streams."""

    command: Command
    code: int
    printed: str


def blocks_of(document: str) -> list[Block]:
    """The fenced blocks of a document, in order."""
    return [Block(*found) for found in _FENCED.findall(document)]


def commands_of(block: Block) -> list[Command]:
    """The commands of a `console` or `sh` block; one that ends with a backslash goes on in the next line."""
    commands: list[Command] = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.kind == "sh" or line.startswith("$ "):
            commands.append(Command(shlex.split(line.removeprefix("$ "), comments=True), []))
        elif commands and line.strip():
            commands[-1].shown.append(line)
    return [command for command in commands if command.words]


def run_document(document: str, kinds: Sequence[str] = ("console",)) -> Iterator[Ran]:
    """Runs what blocks of these kinds say, in the current folder, and yields what every command did."""
    for block in blocks_of(document):
        if block.file is not None:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.kind in kinds:
            for command in commands_of(block):
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                    code = _run(command.words)
                yield Ran(command, code, printed.getvalue())


def _run(words: list[str]) -> int:
    program, *arguments = words
    if program == "moe-jax" and "--compile-only" in arguments:
        return _run_alone(arguments)
    if program == "moe-jax":
        return main(arguments)
    assert program == "python" and len(arguments) == 1, f"a walkthrough runs moe-jax and files of its own, not {words}"
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _run_alone(arguments: list[str]) -> int:
    """Runs `moe-jax` in a process of its own: JAX learns of the TPU compiler from the environment, when it starts."""
    clean = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    clean["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "moe_jax.commands.cli", *arguments]
    ran = subprocess.run(command, env=clean, capture_output=True, text=True)
    print(ran.stdout, ran.stderr)
    return ran.returncode


def read_by_parsers(block: Block) -> list[list[str]]:
    """Reads the arguments of every `moe-jax` command of a block, and returns the commands.

    Raises:
      InputError: if the command does not take them.
    """
    read = []
    for words, _ in commands_of(block):
        # Perhaps after settings of the environment.
        if "moe-jax" in words:
            _, *rest = words[words.index("moe-jax") :]
            name, *arguments = rest[2:] if rest[0] == "--import" else rest
            parse_arguments(importlib.import_module(f"moe_jax.commands.{name}").Options, arguments, command=name)
            read.append([name, *arguments])
    return read


def form(line: str) -> str:
    """A line without what differs between models, machines and runs: numbers, units, layers, borders of tables."""
    line = _LINES_OF_TABLES.sub(" ", line).strip()
    line = re.sub(r"\{[\d.,]+\}", "{#}", line)
    line = re.sub(r"layers/(\{#\}|\d+)", "layers/#", line)
    line = re.sub(r"(?<![\w#])[-+]?\d+(,\d{3})*(\.\d+)?(e[-+]?\d+)?", "#", line)
    line = re.sub(r"#(, #)+", "#", line)
    line = re.sub(r"# (min # s|h # min|min|h|s|ms)\b", "# s", line)
    return re.sub(r"# ([kKMGT]i?)?B\b", "# B", line)


def not_printed(ran: Ran) -> list[str]:
    """Those of the lines that a document shows which the command did not print, in this form and order."""
    printed, missing = iter([form(line) for line in ran.printed.splitlines()]), []
    for line in ran.command.shown:
        wanted, begins = form(line.removesuffix("...")), line.endswith("...")
        if not any(found.startswith(wanted) if begins else found == wanted for found in printed):
            missing.append(line)
            printed = iter([])
    return missing


def _main(document: str, folder: str, *models: str) -> None:
    text = Path(document).read_text(encoding="utf-8")
    Path(folder).mkdir(parents=True)
    os.chdir(folder)
    for name, path in (model.split("=") for model in models):
        Path(name).symlink_to(path)
    for ran in run_document(text):
        print(f"$ {shlex.join(ran.command.words)}\n{ran.printed}", flush=True)
        for line in not_printed(ran):
            print(f"NOT PRINTED: {line}", flush=True)
        if ran.code:
            sys.exit(ran.code)


if __name__ == "__main__":
    _main(*sys.argv[1:])
