"""What routers do on a text: merging methods weight and group experts by it (METHODS 5)."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from moe_jax.nn.router_stats import RouterStatistics as RouterStatistics


class Calibration(NamedTuple):
    """All routers. `train.expert_load.measure_router_statistics` measures them.

    Attributes:
      text: the file.
      layers: by layer index.
    """

    text: Path
    layers: Mapping[int, RouterStatistics]
