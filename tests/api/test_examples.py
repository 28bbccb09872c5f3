"""Every name of the public API has a docstring with an example that runs."""

import doctest
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import moe_jax
from tests.support.tiers import one_in

SOURCE = pathlib.Path(moe_jax.__file__).read_text(encoding="utf-8")
PUBLIC = sorted(re.findall(r"import (\w+) as \1$", SOURCE, re.MULTILINE))
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@one_in(3)
@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_public_name_gives_what_it_says(name, tmp_path):
    thing = getattr(moe_jax, name)
    text = inspect.getdoc(thing)
    assert text, f"moe_jax.{name} has no docstring"
    example = doctest.DocTestParser().get_doctest(text, {"moe_jax": moe_jax, "folder": tmp_path}, name, None, 0)
    assert example.examples, f"the docstring of moe_jax.{name} has no example"
    report: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(example, out=report.append)
    assert not report, "".join(report)


def test_no_public_name_is_the_name_of_a_room():
    """Importing the room would put it in the place of the name."""
    rooms = {module.name for module in pkgutil.iter_modules(moe_jax.__path__)}
    assert not rooms & set(PUBLIC)


def test_what_is_public_is_imported_when_it_is_asked_for():
    code = "import sys, moe_jax; assert 'jax' not in sys.modules; moe_jax.route; assert 'jax' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
