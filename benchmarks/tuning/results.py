"""The file of results of `peft_quality.py`."""

from evidence.results import ResultsFile
from tuning.settings import Settings


class Results(ResultsFile):
    """Keys: `rates` by part and run; `upcycled` by kind and seed; `bases` by seed; `tuned` by domain, variant, seed."""

    settings_type = Settings
    names_at = {"rates": 2, "upcycled": 2, "tuned": 2}
