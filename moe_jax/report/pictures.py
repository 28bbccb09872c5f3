"""Pictures for a page: drawn twice, in the colours of a light page and of a dark one, as SVG inside a data address."""

import base64
import functools
import io
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class Picture(NamedTuple):
    """A picture.

    Attributes:
      light, dark: `data:` addresses, for pages of either kind.
      alt: what it shows, in words.
    """

    light: str
    dark: str
    alt: str


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


def drawn(draw: Callable[[Any], None], alt: str) -> Picture:
    """Draws a picture in both schemes of colours.

    Args:
      draw: draws it with matplotlib and saves it to the file that it is given.
      alt: what it shows, in words.
    """
    return Picture(_as_address(draw, _LIGHT), _as_address(draw, _DARK), alt)


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

    return {
        "savefig.format": "svg",
        "savefig.facecolor": ink.paper,
        "figure.facecolor": ink.paper,
        "axes.facecolor": ink.paper,
        "axes.edgecolor": ink.line,
        "axes.labelcolor": ink.soft,
        "axes.titlecolor": ink.text,
        "axes.prop_cycle": cycler(color=ink.cycle),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": ink.line,
        "legend.facecolor": ink.paper,
        "legend.edgecolor": ink.line,
        "legend.labelcolor": ink.text,
        "text.color": ink.text,
        "xtick.color": ink.line,
        "ytick.color": ink.line,
        "xtick.labelcolor": ink.soft,
        "ytick.labelcolor": ink.soft,
        # The same numbers give the same bytes. Letters are shapes: another machine has other fonts.
        "svg.hashsalt": "moe_jax",
        "svg.fonttype": "path",
    }
