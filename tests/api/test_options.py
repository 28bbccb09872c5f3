"""Verbs have the options of the commands, by the same names."""

import dataclasses
import inspect
import types
import typing

import pytest

import moe_jax
from moe_jax.commands import adapt, compress, convert, eval, export, generate, merge, upcycle

# What differs on purpose: a verb returns what a command prints, and computes with a model as it was loaded: `load` has
# `base` and `mesh`. A model in memory has `tokenizer_files`.
RENAMED = {"classify": "examples", "no_step0_check": "step0_check", "dst": "out", "src": "model"}
OF_TASKS = {
    *("tasks", "tasks_dir", "data_dir", "limit", "num_fewshot", "apply_chat_template", "cache", "output", "samples"),
}
OF_COMMANDS = {
    "convert": {"dry_run"},
    "export": {"base", "dry_run"},
    "upcycle": {"base"},
    "compress": {"model_base", "json", "sweep", "text"},
    "evaluate": OF_TASKS | {"base", "json", "compute_dtype", "split", "tokenizer", "classify", "labels", "template"},
    "classify": OF_TASKS | {"base", "json", "compute_dtype", "split", "tokenizer", "text", "seq_len"},
    "generate": {"base", "json", "compute_dtype", "mesh", "prompts_file", "ids", "stream", "chat", "system"},
}
COMMANDS = {
    "convert": convert.Options,
    "export": export.Options,
    "upcycle": upcycle.Options,
    "adapt": adapt.Options,
    "merge": merge.Options,
    "compress": compress._Job,
    "evaluate": eval.Options,
    "classify": eval.Options,
    "generate": generate.Options,
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_options_of_a_verb_are_those_of_its_command(verb):
    flags = [field.name for field in dataclasses.fields(COMMANDS[verb])]
    parameters = inspect.signature(getattr(moe_jax, verb)).parameters
    renamed = {RENAMED.get(name, name) for name in flags if name not in OF_COMMANDS.get(verb, set())}
    expected = {name for name, given in parameters.items() if given.kind is not inspect.Parameter.VAR_KEYWORD}
    if verb == "convert":
        renamed = {"src" if name == "model" else name for name in renamed}
    if verb == "merge":
        renamed = {"model" if name == "adapter" else name for name in renamed}
    assert renamed == expected


@pytest.mark.parametrize("verb", ["upcycle", "adapt", "export"])
def test_choices_of_a_verb_are_those_of_its_command(verb):
    flags = typing.get_type_hints(COMMANDS[verb])
    hints = typing.get_type_hints(getattr(moe_jax, verb))
    for name in flags.keys() & hints.keys():
        assert choices(flags[name]) == choices(hints[name]), name


def choices(hint: object) -> set[object]:
    """The words between which an option is a choice."""
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*map(choices, typing.get_args(hint)))
    return set()
