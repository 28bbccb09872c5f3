"""What is not markup is text, whatever it holds."""

from html.parser import HTMLParser

import hypothesis
import hypothesis.strategies as st

from moe_jax.report.markup import Markup, element, escaped, joined


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
    reader.feed(page)
    reader.close()
    return reader


# What a page may hold, line ends as a parser leaves them.
TEXTS = st.text(st.characters(exclude_categories=("Cc", "Cs", "Cn"), include_characters="<>&\"'\n"))


@hypothesis.settings(max_examples=30)
@hypothesis.given(TEXTS, TEXTS)
def test_text_and_attributes_are_read_back_as_they_were(text: str, value: str):
    reader = read(element("p", text, title=value))
    assert reader.elements == [("p", {"title": value})] and reader.text == text


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.text())
def test_no_text_is_an_element(text: str):
    assert not read(escaped(text)).elements
    escaped(text).encode()


def test_what_no_page_can_hold_is_replaced():
    assert escaped("a\0b\x1b[0m\ud800c\n") == "a\ufffdb\ufffd[0m\ufffdc\n"


def test_attributes_that_are_not_given_and_elements_without_an_end():
    assert element("img", alt="", hidden=False, id_=None, data_x=1) == '<img alt="" data-x="1">'
    assert element("details", Markup("<b>x</b>"), None, "&", open=True) == "<details open><b>x</b>&amp;</details>"
    assert joined(None, "<", Markup("<br>")) == "&lt;<br>"
