"""The table of a demo, from the results that it leaves."""

import pathlib

import rich.console

from demo import put
from evidence.layouts import DEMO_MODELS, DEMO_STEPS
from evidence.results import Figures
from moe_jax.demo.comparison import read_results
from moe_jax.demo.page import Page, finish
from readme_table import README, block
from tests.demo.test_page import all_rows, page_of


def test_a_finished_demo_becomes_its_tables(tmp_path: pathlib.Path):
    page: Page = page_of(all_rows(), [])
    finish(rich.console.Console(quiet=True), tmp_path, page, model="m.gguf")
    figures = Figures("demo", tmp_path / "results", writes=True)
    put(figures, read_results(tmp_path))
    _, _, dense, whole, *smaller = DEMO_MODELS.text(figures).splitlines()
    assert dense == "| dense, as it came | 134,515,008 | 269.0 |  |  | 3.799 |  |"
    assert whole == "| upcycled and tuned | 253,988,928 | 508.0 | 318.0 | 16.00 | 1.234 |  |"
    assert smaller[-1] == "| whole model, 3.2 bits | 253,988,928 | 230.0 | 40.0 | 4.10 | 1.250 | +0.0130 |"
    assert DEMO_STEPS.text(figures).splitlines()[2:] == ["| tune | 62 |", "| in all | 62 |"]


def test_the_table_of_the_readme_is_that_of_the_results():
    assert f"```text\n{block(Figures('demo'))}```\n" in README.read_text(encoding="utf-8")
