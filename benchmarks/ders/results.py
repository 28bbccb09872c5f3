"""The file of results of `ders_quality.py`."""

from ders.settings import Settings
from quality.results import ResultsFile


class Results(ResultsFile):
    """What `training` and `compression` found, by kind and seed."""

    settings_type = Settings
