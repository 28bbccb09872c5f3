"""Answers that are one of a few: the word of GQA, yes or no of POPE, the letter of ScienceQA and MMBench."""

import re
from collections.abc import Iterable
from typing import NamedTuple

LETTERS = "ABCDE"
_SAID = re.compile(r"The answer is ([A-Z]).")
_NOES = ("No", "not", "no")


def gqa_prediction(text: str) -> str:
    """Returns what is compared with the right answer of GQA: small letters, without periods at the end."""
    return text.rstrip(".").lower()


def says_yes(text: str) -> bool:
    """Whether a text says yes, as POPE is scored: unless its first sentence has the word No, not or no.

    >>> from moe_jax.evaluation.chosen_answers import says_yes
    >>> says_yes("No, there is none."), says_yes("NO"), says_yes("")
    (False, True, True)
    """
    words = text.split(".")[0].replace(",", "").split(" ")
    return not any(word in words for word in _NOES)


class YesNo(NamedTuple):
    """Answers and truths of questions for yes or no.

    Attributes:
      accuracy: share of right answers.
      precision: of those that were answered with yes, the share for which it is right; 0 if there are none.
      recall: of those for which yes is right, the share that was answered so; 0 if there are none.
      f1: the harmonic mean of both; 0 if both are 0.
      yes: share that was answered with yes.
    """

    accuracy: float
    precision: float
    recall: float
    f1: float
    yes: float


def yes_no(pairs: Iterable[tuple[bool, bool]]) -> YesNo:
    """Returns the figures of (said, true) pairs, of which there is at least one."""
    pairs = list(pairs)
    both = sum(said and true for said, true in pairs)
    said, true = (sum(side) for side in zip(*pairs, strict=True))
    precision, recall = both / max(said, 1), both / max(true, 1)
    f1 = 2 * precision * recall / (precision + recall) if both else 0.0
    return YesNo(sum(one == other for one, other in pairs) / len(pairs), precision, recall, f1, said / len(pairs))


def chosen_letter(text: str, options: int) -> str | None:
    """Returns the letter of the option that a text chooses, as ScienceQA is scored; None: it chooses none.

    That is the whole text, or its beginning before `. `, or what stands in the one `The answer is X.` that it has; the
    programs' last period is any character.

    Args:
      text: what a model wrote.
      options: their number. A letter beyond them chooses none.
    """
    if text in tuple(LETTERS):
        letter = text
    elif text[1:3] == ". " and text[0] in LETTERS:
        letter = text[0]
    else:
        found = _SAID.findall(text)
        letter = found[0] if len(found) == 1 else ""
    return letter if letter and letter in LETTERS[:options] else None
