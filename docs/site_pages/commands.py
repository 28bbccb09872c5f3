"""A page for every command, of its options: what `moe-jax COMMAND --help` says, with links."""

import importlib
import inspect
import re

from moe_jax.commands.arguments import Explained, explained
from moe_jax.commands.cli import COMMANDS

FOLDER = "reference/commands"
_SPECIAL = re.compile(r"([\\`*_<>\[\]|$])")
_FLAG = re.compile(r"(?<![\w-])(--[a-z][\w-]*)")


def pages() -> dict[str, str]:
    """Returns the pages by their files, with one that lists them."""
    made = {f"{FOLDER}/{command}.md": _page(command) for command in COMMANDS}
    rows = "".join(f"| [`moe-jax {name}`]({name}.md) | {in_table(plain(text))} |\n" for name, text in COMMANDS.items())
    made[f"{FOLDER}/index.md"] = (
        "# Commands\n\n`moe-jax COMMAND --help` prints what these pages say.\n\n| command | what it does |\n|---|---|\n"
        f"{rows}\n```{{toctree}}\n:hidden:\n\n{chr(10).join(COMMANDS)}\n```\n"
    )
    return made


def plain(text: str) -> str:
    """Returns a text as Markdown that prints the same; options, and what stands in backticks, are code."""
    parts = re.split(r"`([^`]+)`", text)
    parts[::2] = [_FLAG.sub(r"`\1`", _SPECIAL.sub(r"\\\1", part)) for part in parts[::2]]
    parts[1::2] = [f"`{part}`" for part in parts[1::2]]
    return "".join(parts)


def in_table(text: str) -> str:
    """Returns Markdown that may stand in a cell of a table."""
    return re.sub(r"(?<!\\)\|", r"\|", text)


def _page(command: str) -> str:
    module = importlib.import_module(f"moe_jax.commands.{command}")
    arguments = explained(module.Options)
    left = {argument.name: argument for argument in arguments if not argument.is_positional}
    positional = [argument for argument in arguments if argument.is_positional]
    groups = {title: [left.pop(name) for name in names] for title, names in getattr(module, "GROUPS", {}).items()}
    rest = "Other options" if groups else "Options"
    usage = " ".join(["moe-jax", command, *["[OPTIONS]"] * (len(positional) < len(arguments)),
                      *(argument.call for argument in positional)])  # fmt: skip
    parts = [f"# moe-jax {command}", plain(inspect.cleandoc(module.Options.__doc__ or "")), f"```bash\n{usage}\n```"]
    if examples := inspect.cleandoc(getattr(module, "EXAMPLES", "")):
        parts += ["## Examples", f"```bash\n{examples}\n```"]
    parts.append(f"```{{program}} moe-jax {command}\n```")
    for title, members in {"Arguments": positional, **groups, rest: list(left.values())}.items():
        parts += [f"## {plain(title[0].upper() + title[1:])}", *map(_option, members)] if members else []
    return "\n\n".join(parts) + "\n"


def _option(argument: Explained) -> str:
    # One line for each of several methods.
    text = "\n\n".join(map(plain, [*argument.text.split("\n"), *filter(None, [argument.default])]))
    if "\n" not in argument.text:
        text = text.replace("\n\n", " ")
    return f":::{{option}} {argument.call}\n{text}\n:::"
