"""The parts of pages: sections, tables, lists of facts, written by the macros of `elements.html`, and pictures.

Jinja escapes what is given as text, so that whatever a file holds is shown, and is never HTML. What a function here
returns is HTML, and empty where there is nothing to show. Pictures are drawn twice, in the colours of a light page and
of a dark one, as SVG inside a data address.
"""

import base64
import functools
import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

Cell = str | Markup


@functools.cache
def _macros() -> Any:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("moe_jax.report", "."),
        autoescape=True,
        finalize=_showable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("elements.html").module


def _macro(name: str) -> Callable[..., Markup]:
    return lambda *given: getattr(_macros(), name)(*given)


# What each of them is given, and writes, is in `elements.html`.
_NAMES = (
    *("facts", "side_by_side", "folded", "code", "note", "warning", "lines", "with_spread", "steps"),
    *("said", "answers"),
)
facts, side_by_side, folded, code, note, warning, lines, with_spread, steps, said, answers = map(_macro, _NAMES)

# What no page may hold: control characters, halves of characters, and what is no character.
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A}
_FORBIDDEN = dict.fromkeys(
    {*_CONTROLS, *range(0xD800, 0xE000), *range(0xFFFE, 0x110000, 0x10000), *range(0xFFFF, 0x110000, 0x10000)}, "\ufffd"
)


def table(
    caption: str,
    columns: Sequence[Cell],
    rows: Iterable[Sequence[Cell]],
    *,
    words: int | Iterable[int] = 1,
    last_is_total: bool = False,
    class_: str | None = None,
) -> Markup:
    """Returns a table with a caption, if it has rows. The first column names its row.

    `words` says how many columns from the left, or which ones, hold words; the others hold figures, aligned on the
    right. The style knows the table by `class_`.
    """
    left = set(range(words)) if isinstance(words, int) else set(words)
    return _macros().table(caption, columns, list(rows), left, last_is_total, class_)


def picture(draw: Callable[[Any], None], alt: str, caption: str, *, wide: bool = False) -> Markup:
    """Returns a picture, drawn for a light page and for a dark one; a wide one needs the whole width of the page.

    `draw` draws it with matplotlib and saves it to the file that it is given; `alt` says what it shows to those who do
    not see it, and `caption` stands below it.
    """
    return _macros().picture(_as_address(draw, _LIGHT), _as_address(draw, _DARK), alt, caption, wide)


def photograph(png: bytes, alt: str, caption: str, *, wide: bool = False) -> Markup:
    """Returns a picture that is shown as it is: `png` is the content of its file; the rest as of `picture`."""
    address = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return _macros().picture(address, address, alt, caption, wide)


def joined(*parts: Markup) -> Markup:
    """Returns parts one after another."""
    return Markup("").join(parts)


def section(title: str, *content: Markup, level: int = 2, id_: str | None = None) -> Markup:
    """Returns a heading and what is below it, if there is anything."""
    return _macros().section(title, joined(*content), level, id_)


def html_page(
    title: str, *content: Markup, subtitle: str | None = None, contents: Sequence[tuple[str, str]] = ()
) -> str:
    """Returns a page as the text of one file that needs nothing else: no script, no font, no request to a network.

    `contents` has id and title of the sections that a list of contents leads to; none without at least two.
    """
    return str(_macros().page(title, joined(*content), subtitle, contents))


def _showable(value: Any) -> Any:
    return value.translate(_FORBIDDEN) if isinstance(value, str) and not isinstance(value, Markup) else value


class _Ink(NamedTuple):
    """Colours of a page, as `style.css` has them."""

    paper: str
    text: str
    soft: str
    line: str
    cycle: tuple[str, ...]


# Eight colours that people with any kind of sight tell apart (Okabe and Ito), the dark ones lighter on a dark page.
_LIGHT = _Ink("#ffffff", "#1c2430", "#5a6675", "#d5dbe3",
              ("#1f5fa8", "#c4541a", "#0b7d5f", "#a3457f", "#8a6d00", "#2a8fbd", "#6b5bb5", "#5a6675"))  # fmt: skip
_DARK = _Ink("#171c23", "#e4e8ee", "#9aa6b4", "#38424e",
             ("#6fb1f0", "#f08c55", "#3fc79f", "#e08fc0", "#dcbf4a", "#7fd0ef", "#a99bee", "#9aa6b4"))  # fmt: skip


def _as_address(draw: Callable[[Any], None], ink: _Ink) -> str:
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context(_style(ink)):
        draw(file)
    # It says when the picture was drawn, and by what.
    content = re.sub(rb"<metadata>.*?</metadata>\s*", b"", file.getvalue(), flags=re.DOTALL)
    return f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"


@functools.cache
def _style(ink: _Ink) -> dict[Any, Any]:
    from cycler import cycler

    colours = (
        (ink.paper, ("savefig.facecolor", "figure.facecolor", "axes.facecolor", "legend.facecolor")),
        (ink.text, ("axes.titlecolor", "legend.labelcolor", "text.color")),
        (ink.soft, ("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")),
        (ink.line, ("axes.edgecolor", "grid.color", "legend.edgecolor", "xtick.color", "ytick.color")),
    )
    return {name: colour for colour, names in colours for name in names} | {
        "savefig.format": "svg",
        "axes.prop_cycle": cycler(color=ink.cycle),
        "axes.spines.top": False,
        "axes.spines.right": False,
        # The same numbers give the same bytes. Letters are shapes: another machine has other fonts.
        "svg.hashsalt": "moe_jax",
        "svg.fonttype": "path",
    }
