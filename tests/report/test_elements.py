"""What is given to a page as text is text there, whatever it holds."""

from html.parser import HTMLParser

import hypothesis
import hypothesis.strategies as st

from moe_jax.report.elements import code, facts, folded, html_page, joined, note, section, side_by_side, table


class Reader(HTMLParser):
    """Collects the elements and the text of a page."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(str(page))
    reader.close()
    return reader


# What a page may hold, line ends as a parser leaves them.
TEXTS = st.text(st.characters(exclude_categories=("Cc", "Cs", "Cn"), include_characters="<>&\"'\n"))


@hypothesis.settings(max_examples=30)
@hypothesis.given(TEXTS, TEXTS)
def test_text_and_attributes_are_read_back_as_they_were(text: str, value: str):
    reader = read(code(text, value))
    assert [name for name, _ in reader.elements] == ["pre", "code"]
    assert reader.elements[0][1]["aria-label"] == value and reader.text == text


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.text())
def test_no_text_is_an_element(text: str):
    assert [name for name, _ in read(note(text)).elements] == ["p"]
    note(text).encode()


def test_what_no_page_can_hold_is_replaced():
    assert note("a\0b\x1b[0m\ud800c\ufffe\t\n") == '<p class="note">a\ufffdb\ufffd[0m\ufffdc\ufffd\t\n</p>'


def test_what_is_empty_is_not_on_the_page():
    nothing = table("of nothing", ["a"], [])
    parts = [section("title", nothing), folded("more", nothing), side_by_side(), facts({"a": None})]
    assert not nothing and not joined(*parts)
    assert [name for name, _ in read(html_page("title")).elements].count("main") == 1


def test_columns_hold_words_or_figures_and_the_last_row_may_be_a_total():
    shown = table(
        "sizes", ["part", "n", "dtype"], [("<a>", "1", "f"), ("all", "1", "")], words={0, 2}, last_is_total=True
    )
    reader = read(shown)
    cells = [attributes.get("class") for name, attributes in reader.elements if name in ("th", "td")]
    assert cells == ["words", "figure", "words"] * 3
    assert [attributes for name, attributes in reader.elements if name == "tr"] == [{}, {}, {"class": "total"}]
    assert reader.text == "sizespartndtype<a>1fall1"
