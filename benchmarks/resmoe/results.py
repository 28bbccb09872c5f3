"""The file of results of `resmoe_quality.py`."""

from quality.results import ResultsFile
from resmoe.settings import Settings


class Results(ResultsFile):
    """`models` by origin and seed, and `compression` by origin, variant, value and seed."""

    settings_type = Settings
