"""Every name of the public API has a docstring with an example that runs."""

import dataclasses
import doctest
import inspect
import operator
import pathlib
import pkgutil
import re
import subprocess
import sys
from types import FunctionType

import pytest

import moe_jax
from tests.support.tiers import one_in

SOURCE = pathlib.Path(moe_jax.__file__).read_text(encoding="utf-8")
PUBLIC = sorted(re.findall(r"import (\w+) as \1$", SOURCE, re.MULTILINE))
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


NAMESPACES = sorted({module.name for module in pkgutil.iter_modules(moe_jax.__path__)} & set(PUBLIC))


def names_in(namespace: str) -> list[str]:
    """What a namespace offers: functions, classes and constants, and not the modules that they are from."""
    module = getattr(moe_jax, namespace)
    return [name for name in dir(module) if name[0] != "_" and not inspect.ismodule(getattr(module, name))]


@one_in(4)
@pytest.mark.parametrize("name", [*PUBLIC, "Model.split", "Decoder.loss", "nn.Layers"])
def test_the_example_of_a_public_name_gives_what_it_says(name, tmp_path):
    thing = operator.attrgetter(name)(moe_jax)
    text = inspect.getdoc(thing)
    assert text, f"moe_jax.{name} has no docstring"
    example = doctest.DocTestParser().get_doctest(text, {"moe_jax": moe_jax, "folder": tmp_path}, name, None, 0)
    assert example.examples, f"the docstring of moe_jax.{name} has no example"
    report: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(example, out=report.append)
    assert not report, "".join(report)


def test_only_namespaces_are_named_as_rooms_are():
    """Importing the room would put it in the place of the name."""
    rooms = {"compression", "configs", "experts", "functional", "nn", "peft", "training", "typing", "upcycling"}
    assert rooms == set(NAMESPACES)
    assert all(getattr(moe_jax, name) is sys.modules[f"moe_jax.{name}"] for name in NAMESPACES)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_name_in_a_namespace_says_what_it_is(namespace):
    things = {name: getattr(getattr(moe_jax, namespace), name) for name in names_in(namespace)}
    assert len(things) > 3
    # A dataclass, or a tuple with names, has a text of its own that only repeats its fields.
    bare = re.compile(r"\w+\(.*\)$")
    texts = {name: thing.__doc__ for name, thing in things.items() if isinstance(thing, type | FunctionType)}
    assert not [name for name, text in texts.items() if not text or bare.match(text)]


def test_every_config_is_in_one_place_and_importing_them_imports_no_jax():
    configs = {type(default) for default in vars(moe_jax.configs.Recipe).values() if dataclasses.is_dataclass(default)}
    everywhere = [names_in(namespace) for namespace in NAMESPACES] + [PUBLIC]
    named = {name for names in everywhere for name in names if name.endswith("Config")}
    assert named | {config.__name__ for config in configs} <= set(names_in("configs"))
    lazy = "moe_jax.configs, moe_jax.functional, moe_jax.training, moe_jax.typing"
    code = f"import sys, {lazy}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_public_is_imported_when_it_is_asked_for():
    code = "import sys, moe_jax; assert 'jax' not in sys.modules; moe_jax.route; assert 'jax' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
