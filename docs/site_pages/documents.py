"""Pages of the documents at the root of the repository, and of results: they stay where a reader looks for them."""

import re
from pathlib import Path

from evidence.pages import OVERVIEW, PAGES, Filled, names
from site_pages.links import ROOT, moved

RESULTS = "results"


def pages() -> dict[str, str]:
    """Returns the pages by their files: BENCHMARKS.md, the pages of results that it leads to, and other documents."""
    made = {f"{RESULTS}/{name}": text for name, text in _results().items()}
    for name, page in (("CONTRIBUTING.md", "contributing.md"), ("CHANGELOG.md", "changelog.md")):
        if (ROOT / name).exists():
            made[page] = moved((ROOT / name).read_text(encoding="utf-8"), ROOT / name, Path(page))
    return made


def _results() -> dict[str, str]:
    filled = Filled()
    overview = filled.page(OVERVIEW).replace("# Benchmarks", "# Results", 1)
    made = {"index.md": moved(overview, ROOT / "BENCHMARKS.md", Path(RESULTS, "index.md"))}
    order = list(dict.fromkeys(re.findall(rf"\]\({PAGES.relative_to(ROOT)}/(\w+)\.md", overview)))
    assert sorted(order) == names(), "BENCHMARKS.md leads to every page"
    for name in order:
        made[f"{name}.md"] = moved(filled.page(name), PAGES / f"{name}.md", Path(RESULTS, f"{name}.md"))
    made["index.md"] += "\n```{toctree}\n:maxdepth: 1\n:hidden:\n\n" + "\n".join(order) + "\n```\n"
    return made
