"""The file of results of `ders_quality.py`."""

from ders.settings import Settings
from evidence.results import ResultsFile


class Results(ResultsFile):
    """What `training` and `compression` found, by kind and seed, and the losses of the models that are `compressed`."""

    settings_type = Settings
    names_at = {"training": 1, "compression": 2}
