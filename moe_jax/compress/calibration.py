"""What routers do on a text: merging methods weight and group experts by it (METHODS 5)."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class RouterStatistics(NamedTuple):
    """One router on all tokens of a text.

    Attributes:
      usage: share of the assignments that every expert got; float64, sums to 1.
      score: mean probability of every expert, over all tokens; float64, sums to 1.
      similarity: cosine between the logits of two experts over the tokens; float64.
    """

    usage: Float[np.ndarray, " E"]
    score: Float[np.ndarray, " E"]
    similarity: Float[np.ndarray, "E E"]


class Calibration(NamedTuple):
    """All routers.

    Attributes:
      text: the file.
      layers: by layer index.
    """

    text: Path
    layers: Mapping[int, RouterStatistics]
