"""The notebooks: text that is Python, and that runs from its first cell to its last with the small model."""

import ast
import re

import pytest

from tests.support.environment import ROOT
from tests.support.tiers import long

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.md"))
CELL = re.compile(r"^```\{code-cell\} ipython3\n(?::tags: [^\n]*\n\n)?(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_cells_are_python_without_outputs(file):
    text = file.read_text(encoding="utf-8")
    cells = CELL.findall(text)
    assert len(cells) > 3 and text.count("```{code-cell}") == len(cells)
    for cell in cells:
        ast.parse(cell)


@long
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file, monkeypatch):
    jupytext = pytest.importorskip("jupytext")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = jupytext.read(file, fmt="md:myst")
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(file.parent)}}).execute()
    pictures = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})
    ]
    assert len(pictures) >= 2
