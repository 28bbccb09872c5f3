"""The canvas of all pictures. Their colours are matplotlib's settings at the time, so that a page can choose them."""

from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DrawnTo = Path | IO[bytes]
"""The file of a picture: a PNG at a path, or a file in the format of matplotlib's settings (`savefig.format`)."""


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of a size in inches."""
    # pyplot is not used: it has global state, and may choose a backend that needs a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def ink() -> str:
    """The colour of text, for lines that stand out from the coloured ones."""
    import matplotlib

    return matplotlib.rcParams["text.color"]
