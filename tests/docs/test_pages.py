"""The generated pages of the site: everything public is on one, and every variable of the environment is explained."""

import inspect
import re

import pytest

from evidence.pages import PAGES
from moe_jax.commands.cli import COMMANDS
from moe_jax.training.recipe import Recipe
from moe_jax.training.recipe_toml import recipe_keys
from site_pages import write_pages
from site_pages.names import home_of, namespaces, public_names
from tests.project.test_help import ROOMS, names_in
from tests.support.environment import ROOT


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("docs")
    return {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in write_pages(folder)}


def test_every_public_name_is_in_the_index_of_its_namespace_and_explained_once(pages):
    assert list(namespaces()) and set(namespaces()) == {
        "moe_jax",
        *(f"moe_jax.{room}" for room in ROOMS),
        "moe_jax.experts.forms",
    }
    explained = [
        line.split()[-1]
        for text in pages.values()
        for line in text.splitlines()
        if re.match(r"\.\. (auto\w+|py:data)::", line)
    ]
    assert len(explained) == len(set(explained))
    for namespace in namespaces():
        names, module = public_names(namespace), namespaces()[namespace]
        in_help = names_in(namespace.removeprefix("moe_jax").strip("."))
        assert {name for name in in_help if not inspect.ismodule(getattr(module, name))} == set(names)
        index = pages[f"reference/api/{namespace}.rst"]
        for name in names:
            assert f":py:obj:`{name} <{home_of(namespace, name)}>`" in index, f"{namespace}.{name}"
            assert home_of(namespace, name) in explained


def test_pages_that_are_made_no_longer_are_removed(tmp_path):
    old = tmp_path / "reference" / "api" / "moe_jax.gone.rst"
    old.parent.mkdir(parents=True)
    old.touch()
    written = write_pages(tmp_path)
    assert not old.exists() and all(file.exists() for file in written)
    times = [file.stat().st_mtime_ns for file in written]
    assert [file.stat().st_mtime_ns for file in write_pages(tmp_path)] == times


def test_every_command_has_a_page_with_its_options_and_examples(pages):
    for command in COMMANDS:
        assert f"[`moe-jax {command}`]({command}.md)" in pages["reference/commands/index.md"]
    upcycle = pages["reference/commands/upcycle.md"]
    assert "```bash\nmoe-jax upcycle [OPTIONS] SRC DST\n```" in upcycle
    assert ":::{option} --experts N\nExperts per MoE layer; with" in upcycle
    assert "copies of the FFN that are cut into experts. (default: 8; of an MoE twice its own)\n:::" in upcycle
    assert "## Of `--method` pesc" in upcycle and "moe-jax upcycle llama-dir moe-dir" in upcycle


def test_every_key_of_a_recipe_is_in_the_table_of_its_section(pages):
    text = pages["reference/recipe-keys.md"]
    tables = dict(re.findall(r"^## (\S.*)\n((?:(?!## ).*\n)*)", text, re.MULTILINE))
    for key in recipe_keys(Recipe):
        section, _, name = key.name.rpartition(".")
        title = (
            f"`[[{section[:-2]}]]`"
            if section.endswith("[]")
            else f"`[{section}]`"
            if section
            else "Before all sections"
        )
        assert f"\n| `{name}` | " in tables[title], key.name
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {6}


def test_results_are_pages_below_the_overview(pages):
    made = {name.removeprefix("results/"): text for name, text in pages.items() if name.startswith("results/")}
    assert set(made) == {"index.md", *(file.name for file in PAGES.glob("*.md"))} - {"overview.md", "advice.md"}
    assert made["index.md"].startswith("# Results") and "(claims.md)" in made["index.md"]
    for text in made.values():
        assert "{{" not in text and "benchmarks/pages" not in text and re.search(r"^\|---", text, re.MULTILINE)


def test_every_variable_of_the_environment_is_explained():
    table = (ROOT / "docs" / "reference" / "environment-variables.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `(MOE_JAX_\w+)` \|", table, re.MULTILINE))
    files = [file for folder in ("moe_jax", "train", "tests") for file in (ROOT / folder).rglob("*")]
    files = [
        file for file in (*files, ROOT / "conftest.py", ROOT / "Makefile") if file.suffix in (".py", ".sh", ".yaml", "")
    ]
    found = {
        name
        for file in files
        if file.is_file()
        for name in re.findall(r"MOE_JAX_[A-Z_]*[A-Z]", file.read_text("utf-8"))
    }
    assert len(found) > 10 and found == explained
