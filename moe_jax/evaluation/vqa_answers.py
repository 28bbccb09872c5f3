"""Scores of short answers that ten people gave too: VQAv2, VizWiz, TextVQA.

An answer is simplified first, as the server EvalAI does it (the protocol of Antol et al. 2015 and its public programs),
with their oddities, without which figures could not be compared.
"""

import functools
import re
from collections.abc import Sequence

NUM_ANSWERS = 10
"""Answers of people to a question."""

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_DIGITS_WITH_COMMA = re.compile(r"\d,\d")
# Unless a digit comes next.
_PERIOD = re.compile(r"\.(?!\d)")
# The programs give the flag `re.UNICODE` where `re.sub` takes the number of replacements, and its value is 32.
_MOST_PERIODS = 32
_NUMBERS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip
_ARTICLES = frozenset(("a", "an", "the"))
# Of which any apostrophe may be left out.
_CONTRACTIONS = """
    'ow's'at 'twas ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't
    haven't he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've
    must've mustn't needn't not've o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've
    somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll
    that's there'd there'd've there're there's they'd they'd've they'll they're they've wasn't we'd've we've weren't
    what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're
    why's won't would've wouldn't wouldn't've y'all y'all'd've y'all'll you'd you'd've you'll you're you've
"""


@functools.cache
def _with_apostrophes() -> dict[str, str]:
    table = {"somebody'd": "somebodyd"}  # the one that the programs take out
    for word in _CONTRACTIONS.split():
        table |= {word[:at] + word[at + 1 :]: word for at, character in enumerate(word) if character == "'"}
    return table


def simplified(text: str) -> str:
    """Returns a text in small letters without punctuation and articles, with digits and apostrophes.

        >>> from moe_jax.evaluation.vqa_answers import simplified
        >>> simplified("The two dogs, dont touch.")
        "2 dogs don't touch"

    A mark of punctuation goes where it has a space beside it anywhere in the text, or where there is a comma between
    digits; otherwise a space takes its place. At most 32 periods go.
    """
    removes_all = _DIGITS_WITH_COMMA.search(text) is not None
    plain = text
    for mark in _PUNCTUATION:
        is_removed = removes_all or f"{mark} " in text or f" {mark}" in text
        plain = plain.replace(mark, "" if is_removed else " ")
    plain = _PERIOD.sub("", plain, count=_MOST_PERIODS)
    words = (_NUMBERS.get(word, word) for word in plain.lower().split())
    return " ".join(_with_apostrophes().get(word, word) for word in words if word not in _ARTICLES)


def processed_answer(text: str) -> str:
    """Returns an answer as it is uploaded for VQAv2 and VizWiz, and compared for TextVQA.

    Before `simplified`, commas and question marks go, and `'s` becomes a word.
    """
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    return simplified(_one_line(text.strip()))


def soft_score(answer: str, answers: Sequence[str]) -> float:
    """Returns how far people agree with an answer: the mean, over all of them but one, of `min(1, matches / 3)`.

    >>> from moe_jax.evaluation.vqa_answers import soft_score
    >>> soft_score("yes", ["yes"] * 2 + ["no"] * 8)
    0.6
    """
    shares = []
    for left_out in range(len(answers)):
        matches = sum(other == answer for index, other in enumerate(answers) if index != left_out)
        shares.append(min(1.0, matches / 3))
    return sum(shares) / len(shares)


def vqav2_score(uploaded: str, answers: Sequence[str]) -> float:
    """Returns the score of a `processed_answer` in VQAv2: people's answers are simplified if they differ."""
    answers, uploaded = [_one_line(one) for one in answers], _one_line(uploaded)
    if len(set(answers)) > 1:
        answers, uploaded = [simplified(one) for one in answers], simplified(uploaded)
    return soft_score(uploaded, answers)


def vizwiz_score(uploaded: str, answers: Sequence[str]) -> float:
    """Returns the score of a `processed_answer` in VizWiz: people's answers stay as they are."""
    return soft_score(simplified(_one_line(uploaded)), answers)


def textvqa_score(text: str, answers: Sequence[str]) -> float:
    """Returns the score of what a model wrote in TextVQA: all answers are processed."""
    return soft_score(processed_answer(text), [processed_answer(one) for one in answers])


def _one_line(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()
