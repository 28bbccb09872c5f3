"""Links between documents of the repository, and to places in them, lead to something."""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from evidence.pages import PAGES, names
from site_pages import FOLDERS, WRITERS
from site_pages.links import link_code, moved, slug
from tests.support.environment import ROOT

LINK = re.compile(r"\[[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*\]\((?P<path>[^()\s:#]*)(?:#(?P<anchor>[^()\s]*))?\)")
FENCE = re.compile(r"^(```+).*?^\1[ ]*$", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """Returns the Markdown of the repository that is no copy, made when the site was built."""
    copies = {ROOT / "docs" / place for place in (*FOLDERS, "_build", "contributing.md", "changelog.md")}
    found = (ROOT / "docs").rglob("*.md")
    of_results = [PAGES / f"{name}.md" for name in names()]
    return sorted([*ROOT.glob("*.md"), *of_results, *(file for file in found if not copies & {file, *file.parents})])


def anchors(text: str) -> set[str]:
    """Returns the names of the headings of a document, as GitHub makes them; a repeated one gets a number."""
    seen: Counter[str] = Counter()
    found = set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))
    for heading in re.findall(r"^#+ (.*)", FENCE.sub("", text), re.MULTILINE):
        name = slug(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


@functools.cache
def generated() -> set[Path]:
    """Returns the pages that are made when the site is built; to headings of these nothing links."""
    return {ROOT / "docs" / page for writer in WRITERS for page in writer()}


def broken(file: Path) -> Iterator[str]:
    """Yields the links of a document that lead nowhere."""
    text = file.read_text(encoding="utf-8")
    for link in LINK.finditer(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
        target = (file.parent / link["path"]).resolve() if link["path"] else file
        if target in generated():
            continue
        if not target.exists():
            yield link[0]
        elif link["anchor"] and link["anchor"] not in anchors(target.read_text(encoding="utf-8")):
            yield link[0]


def test_links_lead_to_something():
    files = documents()
    assert ROOT / "README.md" in files and ROOT / "docs" / "methods.md" in files
    assert not [f"{file.relative_to(ROOT)}: {link}" for file in files for link in broken(file)]


def test_what_is_broken(tmp_path):
    (tmp_path / "a.md").write_text(
        "# One `two`\n[x](b.md) [y](#one-two) [z](#three) ![p](p.png)\n```\n[w](gone)\n```\n"
    )
    assert list(broken(tmp_path / "a.md")) == ["[x](b.md)", "[z](#three)", "[p](p.png)"]


@pytest.mark.parametrize(
    ("written", "on_the_site"),
    [
        ("[a](docs/methods.md)", "[a](../methods.md)"),
        ("[a](docs/methods.md#1-routing)", "[a](../methods.md#1-routing)"),
        ("[a](README.md)", "[a](../index.md)"),
        ("[a](BENCHMARKS.md)", "[a](index.md)"),
        ("[a](benchmarks/pages/convert.md)", "[a](convert.md)"),
        ("[a](benchmarks/pages/equal_bytes.md#what-it-says)", "[a](equal_bytes.md#what-it-says)"),
        ("[a `b`](Makefile)", "[a `b`](../../Makefile)"),
        ("[a](moe_jax/experts)", "a"),
        ("[a](https://example.org)", "[a](https://example.org)"),
        ("```\n[a](README.md)\n```", "```\n[a](README.md)\n```"),
    ],
)
def test_links_on_another_page(written, on_the_site):
    assert moved(written, ROOT / "README.md", Path("results", "page.md")) == on_the_site


@pytest.mark.parametrize(
    ("code", "target"),
    [
        ("moe_jax.load", "moe_jax.load"),
        ("moe_jax.nn.MoE(config, 16)", "moe_jax.MoE"),
        ("moe-jax train recipe.toml", "/reference/commands/train"),
        ("moe_jax.gone", None),
        ("moe-jax gone", None),
        ("load", None),
    ],
)
def test_names_and_commands_in_a_text_are_links(code, target):
    pytest.importorskip("sphinx")
    from docutils import nodes

    page = nodes.section(
        "", nodes.title("", "", nodes.literal("", code)), nodes.paragraph("", "", nodes.literal("", code))
    )
    link_code(SimpleNamespace(env=SimpleNamespace(docname="page")), page)
    title, text = page.children
    assert isinstance(title[0], nodes.literal) and text.astext() == code
    assert text[0].attributes.get("reftarget") == target
