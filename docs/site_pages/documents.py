"""Pages of the documents at the root of the repository: they stay where a reader of the repository looks for them."""

import re
from pathlib import Path

from site_pages.links import ROOT, moved

RESULTS = "results"


def pages() -> dict[str, str]:
    """Returns the pages by their files: BENCHMARKS.md a page for every section, others as they are."""
    made = {f"{RESULTS}/{name}": text for name, text in _results().items()}
    for name, page in (("CONTRIBUTING.md", "contributing.md"), ("CHANGELOG.md", "changelog.md")):
        if (ROOT / name).exists():
            made[page] = moved((ROOT / name).read_text(encoding="utf-8"), ROOT / name, Path(page))
    return made


def slug(title: str) -> str:
    """Returns a heading as GitHub names it in links."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def _results() -> dict[str, str]:
    file = ROOT / "BENCHMARKS.md"
    # Comments say which program writes a table.
    text = re.sub(r"<!--.*?-->\n", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    head, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    made, entries = {}, []
    for section in sections:
        title, _, body = section.partition("\n")
        page = f"{slug(title)}.md"
        raised = re.sub(r"^#(#+ )", r"\1", body, flags=re.MULTILINE)
        made[page] = moved(f"# {title}\n{raised}", file, Path(RESULTS, page))
        entries.append(slug(title))
    toctree = "\n```{toctree}\n:maxdepth: 1\n\n" + "\n".join(entries) + "\n```\n"
    made["index.md"] = moved(head.replace("# Benchmarks", "# Results", 1), file, Path(RESULTS, "index.md")) + toctree
    return made
