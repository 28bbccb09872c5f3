"""The file of results of `resmoe_quality.py`."""

from evidence.results import ResultsFile
from resmoe.settings import Settings


class Results(ResultsFile):
    """`models` by origin and seed, and `compression` by origin, variant, value and seed."""

    settings_type = Settings
    names_at = {"models": 1, "compression": 2}
