"""Documents that cannot be used: the first ends everything, or all are skipped, named and counted."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

from moe_jax.core.errors import InputError

OnBad = Literal["stop", "skip"]
"""Whether a document that cannot be used ends everything, or is left out."""

MOST_NAMED = 5
"""Documents that are named of those that are skipped."""


class BadDocument(InputError):
    """A document that cannot be used, while those beside it may be good: the message says where it is, and why."""


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Begins the message of a `BadDocument` in the block with the place of the document, if there is one."""
    try:
        yield
    except BadDocument as error:
        raise BadDocument(f"{where}: {error}" if where else str(error)) from None


class Skipped:
    """The documents that were skipped.

    Attributes:
      skips: whether any are.
      count: number of them.
      problems: where the first `MOST_NAMED` of them are, and what is wrong with each.
    """

    def __init__(self, on_bad: OnBad = "stop"):
        self.count = 0
        self.problems: list[str] = []
        self.skips = on_bad == "skip"

    @contextlib.contextmanager
    def passed_over(self) -> Iterator[None]:
        """Leaves the block at a `BadDocument`, and counts it; raises it if nothing is to be skipped."""
        try:
            yield
        except BadDocument as error:
            if not self.skips:
                raise
            self.count += 1
            if len(self.problems) < MOST_NAMED:
                self.problems.append(str(error))

    def check_any_left(self, kept: int, what: str) -> None:
        """Raises `InputError` if everything was skipped; `what` names the documents' file or set."""
        if self.count and not kept:
            raise InputError(f"{what}: all {self.count:,} documents are bad; the first is {self.problems[0]}")


STOP = Skipped()
"""The first bad document ends everything. Nothing is ever counted in it."""


def skipped_words(count: int) -> str:
    """Returns how many documents were skipped, in words."""
    return "1 bad document was skipped" if count == 1 else f"{count:,} bad documents were skipped"


def skipped_lines(count: int, problems: Sequence[str]) -> list[str]:
    """Returns lines for people: how many documents were skipped, and the first of them."""
    rest = count - len(problems)
    named = [*problems, *([f"and {rest:,} more"] if rest else [])]
    return [f"note: {skipped_words(count)}:", *(f"  {one}" for one in named)]
