"""What pages are made of: sections, tables, lists of facts, pictures."""

from collections.abc import Iterable, Mapping, Sequence

from moe_jax.report.markup import Markup, element
from moe_jax.report.pictures import Picture

Cell = str | Markup


def table(
    caption: str,
    columns: Sequence[Cell],
    rows: Iterable[Sequence[Cell]],
    *,
    words: int | Iterable[int] = 1,
    last_is_total: bool = False,
    class_: str | None = None,
) -> Markup | None:
    """A table with a caption; None if it has no rows. The first column names its row.

    Args:
      caption: says what it shows.
      columns: their titles.
      rows: as many cells each.
      words: how many columns from the left, or which ones, hold words; the others hold figures, which are aligned
        on the right.
      last_is_total: whether the last row sums up the others.
      class_: by which the style knows it.
    """
    rows = [list(row) for row in rows]
    if not rows:
        return None
    left = set(range(words)) if isinstance(words, int) else set(words)
    classes = ["words" if index in left else "figure" for index in range(len(columns))]
    head = [element("th", title, scope="col", class_=name) for title, name in zip(columns, classes, strict=True)]
    body = []
    for number, row in enumerate(rows, start=1):
        cells = [
            element("td", cell, class_=name) if index else element("th", cell, scope="row", class_=name)
            for index, (cell, name) in enumerate(zip(row, classes, strict=True))
        ]
        total = last_is_total and number == len(rows) > 1
        body.append(element("tr", *cells, class_="total" if total else None))
    whole = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head)),
        element("tbody", *body),
        class_=class_,
    )
    # A wide table scrolls by itself; with the keyboard only what has the focus does.
    return element("div", whole, class_="wide", tabindex="0", role="region", aria_label=caption)


def facts(pairs: Mapping[str, Cell | None]) -> Markup | None:
    """A short list of names and values; those that are None are left out."""
    items = [
        element("div", element("dt", name), element("dd", value)) for name, value in pairs.items() if value is not None
    ]
    return element("dl", *items, class_="facts") if items else None


def picture(drawn: Picture, caption: str, *, wide: bool = False) -> Markup:
    """A picture for a light and a dark page, with what it shows in words for those who do not see it.

    Args:
      drawn: the picture.
      caption: stands below it.
      wide: whether it needs the whole width of the page.
    """
    # Paper is white, whatever the screen is.
    dark = element("source", srcset=drawn.dark, media="screen and (prefers-color-scheme: dark)")
    both = element("picture", dark, element("img", src=drawn.light, alt=drawn.alt))
    return element("figure", both, element("figcaption", caption), class_="full" if wide else None)


def section(title: str, *content: Markup | None, level: int = 2, id_: str | None = None) -> Markup | None:
    """A heading and what is below it; None if there is nothing."""
    present = [part for part in content if part]
    if not present:
        return None
    return element("section", element(f"h{level}", title), *present, id=id_)


def side_by_side(*pictures: Markup | None) -> Markup | None:
    """Pictures in as many columns as there is room for."""
    present = [one for one in pictures if one]
    return element("div", *present, class_="pictures") if present else None


def folded(title: str, *content: Markup | None) -> Markup | None:
    """What is shown when its title is clicked, and on paper; None if there is nothing."""
    present = [part for part in content if part]
    return element("details", element("summary", title), *present) if present else None


def code(text: str, label: str) -> Markup:
    """Text with the line breaks that it has, in a font of even width."""
    return element("pre", element("code", text), tabindex="0", role="region", aria_label=label)


def note(text: Cell) -> Markup:
    """A line in a low voice."""
    return element("p", text, class_="note")


def warning(text: Cell) -> Markup:
    """A line that must not be missed."""
    return element("p", element("strong", "Note: "), text, class_="warning")
