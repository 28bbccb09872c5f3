"""The file of all results that claims are decided by."""

from pathlib import Path

from evidence.results import NoSettings, ResultsFile
from evidence.studies import texts
from evidence.studies.jobs import DiffersError

NAME = "claims"


class ClaimsFile(ResultsFile):
    """`OUT/claims.json`. What a result depends on (scale, steps, shape, seed) is in its path; rates are in it."""

    def __init__(self, out: Path):
        """Opens the file in a folder, or begins it."""
        super().__init__(out / f"{NAME}.json", NoSettings())

    def check_texts(self, data: Path) -> None:
        """Writes down which texts are read, or compares them with those of the results.

        Args:
          data: the folder that `claims.py` describes.

        Raises:
          DiffersError: if a text is another one.
        """
        for name in texts.TEXTS:
            found = texts.fingerprint(texts.read_text(name, data))
            if self.get("texts", name) is None:
                self.put("texts", name, value=found)
            elif self.get("texts", name) != found:
                raise DiffersError(
                    f"the text {name} is another one than that of the results (the code is the standard library of the "
                    "Python that runs this); choose another --out"
                )
