"""Links of documents: they are written for who reads the repository, and lead to pages of the site where there are."""

import os
import re
from pathlib import Path
from typing import Any

from moe_jax.commands.cli import COMMANDS
from site_pages.commands import FOLDER
from site_pages.names import resolve

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
_LINK = re.compile(
    r"(?P<picture>!?)\[(?P<text>[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]\((?P<path>[^()\s:#]*)(?P<anchor>#[^()\s]*)?\)"
)
_FENCE = re.compile(r"^(```+|~~~+).*?^\1[ ]*$", re.MULTILINE | re.DOTALL)

# Pages that are made of a document elsewhere.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "BENCHMARKS.md": "results/index.md",
}
OF_RESULTS = Path("benchmarks", "pages")
"""Folder of pages that become those of results, under their names."""


def moved(text: str, file: Path, page: Path) -> str:
    """Returns a document as it stands on another page of the site, with links that lead to the same from there.

    A file of the repository that is no page is downloaded; of a folder only the name stays.

    Args:
      text: Markdown.
      file: where the document is.
      page: the page that it becomes, below `docs/`.
    """

    def rewritten(link: re.Match[str]) -> str:
        if not link["path"]:
            return link[0]
        target = (file.parent / link["path"]).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return link[0]
        if target.is_dir():
            return link["text"]
        place = target.relative_to(ROOT)
        anchor = link["anchor"] or ""
        to = DOCS / PAGES[str(place)] if str(place) in PAGES else target
        if place.parent == OF_RESULTS:
            to = DOCS / "results" / place.name
        return f"{link['picture']}[{link['text']}]({os.path.relpath(to, (DOCS / page).parent)}{anchor})"

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(rewritten, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join(parts) + _LINK.sub(rewritten, text[end:])


def slug(title: str) -> str:
    """Returns a heading as GitHub names it in links."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def rewrite(app: Any, page: str, source: list[str]) -> None:
    """Rewrites the links of a page that is read, in place."""
    file = Path(app.env.doc2path(page))
    if file.suffix == ".md" and Path(app.srcdir) == DOCS:
        source[0] = moved(source[0], file, file.relative_to(DOCS))


def link_code(app: Any, document: Any) -> None:
    """Makes links, in place, of public names and commands that a text has as code."""
    from docutils import nodes
    from sphinx.addnodes import pending_xref

    for code in list(document.findall(nodes.literal)):
        text = code.astext()
        if isinstance(code.parent, nodes.reference | nodes.title | pending_xref):
            continue
        if (name := re.match(r"(moe_jax(?:\.\w+)+)(?:\(.*\))?$", text)) and (target := resolve(name[1])):
            about = {"refdomain": "py", "reftype": "obj", "reftarget": target, "refexplicit": True}
        elif (command := re.match(r"moe-jax (\w+)", text)) and command[1] in COMMANDS:
            page = f"/{FOLDER}/{command[1]}"
            about = {"refdomain": "std", "reftype": "doc", "reftarget": page, "refexplicit": True}
        else:
            continue
        link = pending_xref(text, refdoc=app.env.docname, refwarn=True, **about)
        code.parent.replace(code, link)
        link += code
