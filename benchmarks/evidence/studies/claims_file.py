"""The file of all results that claims are decided by."""

from pathlib import Path

from evidence.results import NoSettings, ResultsFile

NAME = "claims"


class ClaimsFile(ResultsFile):
    """`OUT/claims.json`. What a result depends on (scale, steps, shape, rates, seed) is in its path."""

    def __init__(self, out: Path):
        """Opens the file in a folder, or begins it."""
        super().__init__(out / f"{NAME}.json", NoSettings())
