"""Every option is written down once: in the spec of its verb, of which the command and the Python verb are made."""

import collections
import dataclasses
import importlib
import inspect

import pytest

import moe_jax
from moe_jax.commands.arguments import explained
from moe_jax.commands.cli import COMMANDS
from moe_jax.compression.spec import METHODS, SweepSpec, option_names
from moe_jax.core.verb_spec import Spec, field_texts

SPECS = {
    "convert": moe_jax.ConvertSpec,
    "export": moe_jax.ExportSpec,
    "attach": moe_jax.AttachSpec,
    "upcycle": moe_jax.UpcycleSpec,
    "adapt": moe_jax.AdaptSpec,
    "merge": moe_jax.MergeSpec,
    "compress": moe_jax.CompressSpec,
    "generate": moe_jax.GenerateSpec,
}
# What a command says beside the options of its verb: where files are, and how results are shown.
OF_COMMANDS = {
    "convert": {"src", "dst", "dry_run"},
    "export": {"src", "dst", "dry_run"},
    "attach": {"model", "out"},
    "upcycle": {"src", "dst"},
    "adapt": {"model", "out"},
    "merge": {"adapter", "out"},
    "compress": {"model", "out", "json", "sweep", "text"},
    "generate": {
        *(
            "model",
            "base",
            "prompt",
            "prompts_file",
            "ids",
            "chat",
            "system",
            "compute_dtype",
            "mesh",
            "stream",
            "json",
        ),
    },
}
# Verbs without a spec: the options of the verb that its command calls otherwise, or has not.
RENAMED = {"classify": "examples"}
OF_TASKS = {
    *("tasks", "tasks_dir", "data_dir", "limit", "num_fewshot", "cache", "output", "samples"),
    *("image_folder", "image_aspect"),
}
WITHOUT_SPEC = {
    "evaluate": OF_TASKS | {"base", "json", "compute_dtype", "split", "tokenizer", "classify", "labels", "template"},
    "classify": OF_TASKS
    | {"base", "json", "compute_dtype", "split", "tokenizer", "text", "seq_len", "apply_chat_template"},
}


def options_of_command(name):
    return importlib.import_module(f"moe_jax.commands.{name}").Options


@pytest.mark.parametrize("verb", SPECS)
def test_command_verb_and_spec_have_the_same_options(verb):
    options = {option.name for option in SPECS[verb].list_options()}
    of_methods = set(option_names()) if verb == "compress" else set()
    flags = {field.name.removeprefix("no_") for field in dataclasses.fields(options_of_command(verb))}
    switches = {name for name in of_methods if name not in options}
    assert flags - OF_COMMANDS[verb] - switches == options
    keywords = set(inspect.signature(getattr(moe_jax, verb)).parameters) - {"src", "model", "out", "prompt", "options"}
    assert keywords - switches == options


@pytest.mark.parametrize("verb", WITHOUT_SPEC)
def test_options_of_a_verb_without_a_spec_are_those_of_its_command(verb):
    flags = [field.name for field in dataclasses.fields(options_of_command("eval"))]
    parameters = inspect.signature(getattr(moe_jax, verb)).parameters
    assert {RENAMED.get(name, name) for name in flags if name not in WITHOUT_SPEC[verb]} == set(parameters)


def written_texts():
    """Where every text of an option is written: the classes that define fields with docstrings below them."""
    modules = [importlib.import_module(f"moe_jax.commands.{name}") for name in COMMANDS]
    classes = {one for module in modules for one in module.Options.__mro__}
    classes |= {one for spec in (*SPECS.values(), SweepSpec) for one in spec.__mro__} - {object}
    return [(cls, name, text) for cls in classes for name, text in field_texts_of(cls).items()]


def field_texts_of(cls):
    inherited = {name for base in cls.__bases__ if base is not object for name in field_texts(base)}
    return {name: text for name, text in field_texts(cls).items() if name not in inherited}


def test_no_option_is_written_down_twice():
    """No name with the same text in two classes, and no field of a spec in the class of a command."""
    found, texts = collections.defaultdict(list), written_texts()
    for cls, name, text in texts:
        found[name, text].append(cls.__name__)
    # Where files are, and how results are shown; and what generate and serve have in common.
    common = {"model", "dst", "json", "compute_dtype"}
    twice = {name: classes for (name, _), classes in found.items() if len(classes) > 1 and name not in common}
    assert not twice
    for verb, spec in SPECS.items():
        own = {name for cls, name, _ in texts if cls.__name__ == "_Command" and
               cls.__module__ == f"moe_jax.commands.{verb}"}  # fmt: skip
        assert own and not own & {field.name for field in dataclasses.fields(spec)}, verb


def test_plan_writes_down_no_option_of_another_verb():
    own = {field.name for cls in options_of_command("plan").__mro__ if cls.__name__ == "_Command"
           for field in dataclasses.fields(cls)}  # fmt: skip
    theirs = {field.name for spec in (moe_jax.UpcycleSpec, moe_jax.AdaptSpec) for field in dataclasses.fields(spec)}
    assert not own & theirs


def test_the_help_of_compress_names_every_method_and_its_options():
    (method,) = [one for one in explained(options_of_command("compress")) if one.name == "method"]
    assert all(f"\n{name}: " in method.text for name in METHODS)
    assert set(option_names()) <= set(inspect.signature(moe_jax.compress).parameters)


@pytest.fixture(scope="module")
def dense() -> moe_jax.Model:
    return moe_jax.tiny_model()


@pytest.mark.parametrize("verb", SPECS)
def test_a_verb_takes_its_spec_or_options_and_names_the_nearest_for_an_unknown_one(verb, dense, tmp_path):
    call, spec = getattr(moe_jax, verb), SPECS[verb]
    assert issubclass(spec, Spec) and spec.verb() == verb
    known = spec.list_options()[-1].name
    with pytest.raises(moe_jax.InputError, match=f"did you mean '{known}'"):
        call(dense, tmp_path / "out", **{f"{known}x": True})
    with pytest.raises(moe_jax.InputError, match=spec.__name__):
        call(dense, tmp_path / "out", object())
    assert not list(tmp_path.iterdir())


def test_a_spec_and_its_options_make_the_same_model(dense):
    made = [
        moe_jax.upcycle(dense, experts=4, delta="low-rank:2", z_coef=0.1),
        moe_jax.upcycle(dense, None, moe_jax.UpcycleSpec(experts=4, delta="low-rank:2", z_coef=0.1)),
        moe_jax.upcycle(dense, spec=moe_jax.UpcycleSpec(experts=4, delta="low-rank:2", z_coef=0.1)),
    ]
    assert len({model.source.fingerprint() for model in made}) == 1
    assert made[0].config.moe(1).z_coef == 0.1 and made[0].lineage[-1]["options"]["z_coef"] == 0.1
    assert made[0].report.step0.difference == 0


def test_what_is_no_model_or_no_place_is_named(dense):
    calls = {
        "a model or the path of one, got 42": lambda: moe_jax.compress(42, method="up", keep=0.5),
        r"merge\(\) is missing model": lambda: moe_jax.merge(),
        r"upcycle\(\) is missing model; it has no option dense": lambda: moe_jax.upcycle(dense=dense),
        r"export\(\) is missing out": lambda: moe_jax.export(dense),
        "a spec is the third argument": lambda: moe_jax.upcycle(dense, moe_jax.UpcycleSpec()),
        "two values for model": lambda: moe_jax.upcycle(dense, model=dense),
    }
    for said, call in calls.items():
        with pytest.raises(TypeError, match=said):
            call()
    for spec, options, got in ((moe_jax.UpcycleSpec(), {"experts": 2}, "also experts"), ({}, {}, "a dict")):
        with pytest.raises(moe_jax.InputError, match=rf"upcycle\(\) takes the spec UpcycleSpec or its .*; got {got}"):
            moe_jax.upcycle(dense, None, spec, **options)
