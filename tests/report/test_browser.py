"""Pages in a real browser; and that the browser would find what is wrong with one."""

import base64
from pathlib import Path

import pytest

from moe_jax.demo.comparison import Row
from moe_jax.demo.page import Answers, Page, write_page
from tests.support.browser import Browser

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
IMAGE = '<img alt="a pixel" src="data:image/png;base64,{}">'
TABLE = "<table><caption>figures</caption><tbody>{}</tbody></table>"
WHOLE = IMAGE.format(base64.b64encode(PIXEL).decode())
ROW = "<tr><th>a</th><td>1</td></tr>"
FAULTS = {
    "a picture does not load: a pixel": IMAGE.format(base64.b64encode(PIXEL[:40]).decode()),
    "a picture has no text in its place": WHOLE.replace('alt="a pixel"', ""),
    "a table has no rows: figures": TABLE.format(""),
    "a table has no caption": f"<table><tbody>{ROW}</tbody></table>",
    "a row has other columns: figures": TABLE.format(f"{ROW}<tr><td>2</td></tr>"),
    "an error of a script": "<script>nothing.there()</script>",
    "a script complains": "<script>console.error('no')</script>",
    "a request to http://localhost:9/x.css": '<link rel="stylesheet" href="http://localhost:9/x.css">',
    "the page is wider than its window": '<div style="width: 3000px">wide</div>',
}


@pytest.fixture
def page_of(tmp_path: Path):
    def write(body: str) -> Path:
        file = tmp_path / "page.html"
        file.write_text(f'<!doctype html><meta charset="utf-8"><title>page</title><h1>A page</h1>{body}')
        return file

    return write


def test_what_is_whole_is_found_whole(browser: Browser, page_of):
    found = browser.examine(page_of(WHOLE + TABLE.format(ROW)))
    assert found == ([], 1, 1, ["A page"])


@pytest.mark.parametrize(("problem", "body"), FAULTS.items(), ids=FAULTS.keys())
def test_what_is_broken_is_found(browser: Browser, page_of, problem: str, body: str):
    found = browser.examine(page_of(body))
    assert any(one.startswith(problem) for one in found.problems), found.problems


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_of_the_demo(browser: Browser, tmp_path: Path, dark: bool):
    answers = [Answers("1 < 2?", {"whole": "No", "small": "<b>yes</b><script>nothing.there()</script>"})]
    rows = [
        Row("whole", 253_988_928, 507_977_856, 318_000_000, 16.0, 1.234, 0.21, 590),
        Row("small", 253_988_928, 224_000_000, 34_000_000, 1.75, 1.241, 0.216, 590),
    ]
    records = [{"step": step, "loss": 4.0 / step} for step in range(1, 9)]
    page = Page("moe-jax demo: model", answers, rows, "whole", records, "word problems", "token", {"tune": 62.0})
    write_page(tmp_path / "page.html", page)
    found = browser.examine(tmp_path / "page.html", dark=dark)
    assert (found.problems, found.images, found.tables) == ([], 2, 2)
    assert found.headings[0] == "moe-jax demo: model"
