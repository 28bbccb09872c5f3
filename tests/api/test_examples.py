"""Every name of the public API has a docstring with an example that runs."""

import ast
import doctest
import importlib
import inspect
import pathlib

import pytest

import moe_jax
from tests.tiers import one_in

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@one_in(3)
@pytest.mark.parametrize("name", moe_jax.__all__)
def test_the_example_of_a_public_name_gives_what_it_says(name, tmp_path):
    thing = getattr(moe_jax, name)
    text = inspect.getdoc(thing)
    assert text, f"moe_jax.{name} has no docstring"
    example = doctest.DocTestParser().get_doctest(text, {"moe_jax": moe_jax, "folder": tmp_path}, name, None, 0)
    assert example.examples, f"the docstring of moe_jax.{name} has no example"
    report: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(example, out=report.append)
    assert not report, "".join(report)


def test_verbs_stay_public_whatever_room_of_the_same_name_is_imported():
    for name in moe_jax.__all__:
        verb = getattr(moe_jax, name)
        try:
            room = importlib.import_module(f"moe_jax.{name}")
        except ModuleNotFoundError:
            continue
        assert room is not verb and getattr(moe_jax, name) is verb


def test_type_checkers_see_the_names_that_are_imported_late():
    """The imports under TYPE_CHECKING are the table of what `__getattr__` imports."""
    tree = ast.parse(pathlib.Path(moe_jax.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname: f"{node.module}.{alias.name}" for node in block.body for alias in node.names}
    for name in moe_jax.__all__:
        module, _, original = seen.pop(name).rpartition(".")
        assert original == name and getattr(importlib.import_module(module), name) is getattr(moe_jax, name)
    assert not seen
