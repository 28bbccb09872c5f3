"""The pages that are made of the code when the site is built, and how Sphinx is told of them."""

from pathlib import Path
from typing import Any

from site_pages import api, commands, docstrings, documents, links, recipe_keys

WRITERS = (api.pages, commands.pages, recipe_keys.pages, documents.pages)
FOLDERS = (api.FOLDER, commands.FOLDER, documents.RESULTS)
"""Folders that hold nothing but generated pages."""


def setup(app: Any) -> dict[str, bool]:
    """Connects what is generated to the events of Sphinx."""
    app.add_config_value("links_to_others", "0", "env")
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir)))
    app.connect("source-read", links.rewrite)
    app.connect("autodoc-process-signature", docstrings.sign)
    # Before napoleon, which takes the sections apart.
    app.connect("autodoc-process-bases", docstrings.show_bases)
    app.connect("doctree-read", docstrings.tidy)
    app.connect("doctree-read", links.link_code)
    app.connect("autodoc-process-docstring", docstrings.prepare, priority=400)
    return {"parallel_read_safe": True}


def write_pages(folder: Path) -> list[Path]:
    """Writes all generated pages below a folder, and returns their files; what has not changed stays untouched.

    Pages of an earlier build that are made no longer are removed.
    """
    made = {folder / page: text for writer in WRITERS for page, text in writer().items()}
    for file, text in made.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
    for file in (file for place in FOLDERS for file in (folder / place).iterdir()):
        if file not in made:
            file.unlink()
    return list(made)
