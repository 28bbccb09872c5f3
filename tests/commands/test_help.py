"""`moe-jax COMMAND --help`, as someone reads it who has not seen the project before."""

import dataclasses
import importlib
import shlex
from types import ModuleType
from typing import Annotated

import pytest
import tyro

from moe_jax.commands.arguments import WIDEST, explained, help_of, parse_arguments
from moe_jax.commands.cli import COMMANDS, main
from moe_jax.core.errors import flag_of, nearest


def module_of(command: str) -> ModuleType:
    return importlib.import_module(f"moe_jax.commands.{command}")


def commands_in(examples: str) -> list[list[str]]:
    lines = [shlex.split(line, comments=True) for line in examples.splitlines()]
    return [words for words in lines if words]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_does_and_how_it_is_typed(command):
    module = module_of(command)
    summary = module.Options.__doc__.split("\n\n")[0]
    assert summary.endswith(".") and len(summary) < 130
    examples = [words for words in commands_in(module.EXAMPLES) if words[:2] == ["moe-jax", command]]
    assert examples
    for _, _, *arguments in examples:
        assert parse_arguments(module.Options, arguments, command=command) is not None


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_does_and_what_holds_without_it(command):
    for argument in explained(module_of(command).Options):
        assert argument.text.strip() and "None" not in argument.default + argument.call, argument
        value = argument.call.removeprefix(flag_of(argument.name)).strip()
        if not argument.is_positional and (value.isupper() and len(value) == 1 or "|" in value):
            said = f"{argument.text} {argument.default}".lower()
            assert any(word in said for word in ("default", "require", "(repeatable)")), argument


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [80, 120])
def test_help_fits_a_terminal(command, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([command, "--help"]) == 0
    shown, module = capsys.readouterr().out, module_of(command)
    assert shown.startswith(f"usage: moe-jax {command} [-h]")
    described, _, examples = shown.partition("\nexamples:\n")
    assert max(map(len, described.splitlines())) <= min(width, WIDEST) and max(map(len, examples.splitlines())) <= 116
    for argument in explained(module.Options):
        assert shown.count(f"\n  {argument.call}") >= 1, argument


@pytest.mark.parametrize("command", COMMANDS)
def test_the_nearest_option_is_suggested_for_each_that_is_misspelled(command):
    flags = [argument.call.split()[0] for argument in explained(module_of(command).Options)]
    flags = [flag for flag in flags if flag.startswith("--") and len(flag) > 6]
    for flag in flags:
        assert "did you mean '--" in nearest(flag[:-2] + flag[-1], flags), flag


def test_one_kind_of_value_has_one_name():
    calls = [argument.call for command in COMMANDS for argument in explained(module_of(command).Options)]
    assert not [call for call in calls if set(call.split()) & {"INT", "FLOAT", "STR", "PATH", "{None}"}]


def test_options_are_grouped_and_every_line_of_a_text_is_its_own():
    several = Annotated[str | None, tyro.conf.arg(metavar="N", help="a: one.\nb: two.")]
    made = dataclasses.make_dataclass("Options", [("keep", several, None), ("dry_run", bool, False)])
    made.__doc__ = "Does it."
    shown = help_of(made, "do", groups={"how": ["keep"]}, examples="\nmoe-jax do\n", width=60)
    assert shown.splitlines() == [
        "usage: moe-jax do [-h] [OPTIONS]",
        "",
        "Does it.",
        "",
        "how:",
        "  --keep N   a: one.",
        "             b: two.",
        "",
        "other options:",
        "  --dry-run",
        "",
        "examples:",
        "  moe-jax do",
    ]
