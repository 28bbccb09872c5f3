"""The picture of the README is of the results that are there."""

import xml.etree.ElementTree as ElementTree

import pytest

from evidence.equal_bytes.entries import ALLOCATED, GPTQ, RTN
from evidence.equal_bytes.report import opened
from evidence.results import RESULTS
from readme_picture import MOST_BYTES, PICTURE, Drawn, digest, draw, drawn_from, lines


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Drawn]]:
    return lines(opened(RESULTS))


def test_the_picture_is_drawn_from_the_results(drawn):
    again = "the picture is older than its results: python benchmarks/readme_picture.py"
    assert drawn_from(PICTURE.read_text()) == digest(drawn), again


def test_other_results_or_colours_are_another_picture(drawn):
    first, *others = drawn[GPTQ]
    assert digest(drawn | {GPTQ: [first._replace(loss=first.loss + 1e-6), *others]}) != digest(drawn)


def test_the_picture_is_small_and_has_colours_for_a_dark_page(drawn):
    svg = draw(drawn)
    assert len(svg.encode()) <= MOST_BYTES
    root = ElementTree.fromstring(svg)
    assert root[0].tag.endswith("title") and "plain codes, GPTQ, and allocate" in (root[0].text or "")
    assert "prefers-color-scheme: dark" in svg and "stroke: #1f5fa8" in svg.split("</style>", 1)[1]


def test_every_line_has_its_points_with_an_interval_around_them(drawn):
    assert all(len(drawn[family]) > 2 for family in (RTN, GPTQ, ALLOCATED))
    assert all(point.low < point.loss < point.high for some in drawn.values() for point in some)
