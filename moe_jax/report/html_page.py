"""One HTML file that needs nothing else: no script, no font, no request to a network."""

import functools
from collections.abc import Sequence
from importlib import resources

from moe_jax.report.markup import Markup, element, joined

# A browser loads nothing from anywhere and runs nothing, whatever slipped in from a file.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def html_page(
    title: str, *content: Markup | None, subtitle: str | None = None, contents: Sequence[tuple[str, str]] = ()
) -> str:
    """The page as the text of a file.

    Args:
      title: of the page.
      content: what is below the title; None is left out.
      subtitle: a line below the title.
      contents: id and title of the sections that a list of contents leads to; none without at least two.
    """
    links = [element("li", element("a", name, href=f"#{target}")) for target, name in contents]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", _style()),
    )
    header = element("header", element("h1", title), element("p", subtitle, class_="note") if subtitle else None)
    nav = element("nav", element("ul", *links), aria_label="contents") if len(links) > 1 else None
    body = element("body", header, nav, element("main", *content))
    return joined(Markup("<!doctype html>\n"), element("html", head, body, lang="en"), "\n")


@functools.cache
def _style() -> Markup:
    return Markup(resources.files("moe_jax.report").joinpath("style.css").read_text(encoding="utf-8"))
