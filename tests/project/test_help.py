"""`help` of the package, and of each of its namespaces, is an index: every public name, on a few screens."""

import inspect
import operator
import pydoc
import re

import pytest

import moe_jax

ROOMS = [name for name in moe_jax.__all__ if inspect.ismodule(getattr(moe_jax, name))]
# Of the modules inside a namespace, those that are public.
MODULES = {"nn": ["filters"], "experts": ["forms"]}


def names_in(room: str) -> list[str]:
    """The public names of a namespace; of the package, if that is empty."""
    if not room:
        return list(moe_jax.__all__)
    module = operator.attrgetter(room)(moe_jax)
    names = [name for name in dir(module) if not name.startswith("_")]
    return [name for name in names if name in MODULES.get(room, ()) or not inspect.ismodule(getattr(module, name))]


@pytest.mark.parametrize("room", ["", *ROOMS, "experts.forms"])
def test_help_is_an_index_of_every_public_name(room):
    text = pydoc.plain(pydoc.render_doc(operator.attrgetter(room)(moe_jax) if room else moe_jax))
    assert len(text.splitlines()) < 150
    assert max(map(len, text.splitlines())) <= 120
    index, names = text.partition("PACKAGE CONTENTS")[0] if room != "filters" else text, names_in(room)
    assert len(names) > 3
    missing = [name for name in names if not re.search(rf"(?<![\w.]){name}(?!\w)", index)]
    assert not missing, f"the docstring of moe_jax.{room} does not name {', '.join(missing)}"


def test_a_star_import_brings_what_is_public():
    names: dict[str, object] = {}
    exec("from moe_jax import *", names)
    assert names.keys() - {"__builtins__"} == set(moe_jax.__all__) == {name for name in dir(moe_jax) if name[0] != "_"}
    assert names["Decoder"] is moe_jax.Decoder
