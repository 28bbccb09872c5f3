"""Answers of VQAv2, VizWiz and TextVQA, against the published algorithm said again in other words."""

import hashlib
import json
import random
import re

import pytest

from moe_jax.evaluation.vqa_answers import (
    _with_apostrophes,
    processed_answer,
    simplified,
    soft_score,
    textvqa_score,
    vizwiz_score,
    vqav2_score,
)

# Of the published table as sorted pairs, without those that change nothing or have a capital letter: no answer has one
# by then.
PUBLISHED_CONTRACTIONS = "853d25c89947b7f6d41f6c5f81b2d6c3119927f4b16f557fc1b03af6ef45605e"
MARKS = [";", "/", "[", "]", '"', "{", "}", "(", ")", "=", "+", "\\", "_", "-", ">", "<", "@", "`", ",", "?", "!"]
PIECES = [
    *["the", "a", "An", "two", "none", "ten", "dont", "let's", "'s", "cat's", "NO", "Yes", "yall'd've", "somebody'd"],
    *[" ", "  ", "\n", "\t", ",", ", ", ".", ". ", "3.5", "1,000", "1,,2", "." * 40, "a. b. ", "?", "!", "-", "a-b"],
    *["(x)", "@", "tab\tx", "É", "½", "", "i'dve", "5.", ".5"],
]  # fmt: skip


def drawn(count=300):
    rng = random.Random(3)
    return ["".join(rng.choice(PIECES) + rng.choice(["", " "]) for _ in range(rng.randint(0, 9))) for _ in range(count)]


def plain(text):
    """Marks first, one after the other, then at most 32 periods, then words."""
    digits_apart = any(re.fullmatch(r"\d,\d", text[at : at + 3]) for at in range(len(text)))
    for_marks = text
    for mark in MARKS:
        touches_space = any(mark in pair and " " in pair for pair in map("".join, zip(text, text[1:], strict=False)))
        for_marks = for_marks.replace(mark, "" if touches_space or digits_apart else " ")
    left, kept = 32, ""
    for at, character in enumerate(for_marks):
        goes = character == "." and not for_marks[at + 1 : at + 2].isdecimal() and left > 0
        left -= goes
        kept += "" if goes else character
    numbers = {"none": "0", **{word: str(n) for n, word in enumerate(
        "zero one two three four five six seven eight nine ten".split())}}  # fmt: skip
    words = [numbers.get(word, word) for word in kept.lower().split()]
    return " ".join(_with_apostrophes().get(word, word) for word in words if word not in ("a", "an", "the"))


def for_upload(text):
    text = "".join(character for character in text.lower() if character not in ",?")
    return plain(" 's".join(text.split("'s")).strip().translate({10: " ", 9: " "}).strip())


def agreement(answer, answers):
    return sum(min(1, (answers.count(answer) - (one == answer)) / 3) for one in answers) / len(answers)


def test_the_table_of_contractions_is_the_published_one():
    pairs = sorted(_with_apostrophes().items())
    assert hashlib.sha256(json.dumps(pairs).encode()).hexdigest() == PUBLISHED_CONTRACTIONS


def test_random_answers_become_what_the_algorithm_makes_of_them():
    for text in drawn():
        assert simplified(text) == plain(text), text
        assert processed_answer(text) == for_upload(text), text


def test_no_more_than_32_periods_go():
    assert simplified("." * 40) == "." * 8
    assert simplified("a.b" * 33).count(".") == 1
    assert simplified("3.5.") == "3.5" and simplified("-.5") == ".5"


def test_random_scores_are_those_of_the_algorithm():
    rng = random.Random(5)
    said = ["yes", "Yes.", "no", "a no", "two", "2", "dog, cat", "The cat", "cat", "dont", "don't", "x\ty"]
    for _ in range(300):
        few = rng.sample(said, rng.randint(1, 4))
        answers, text = [rng.choice(few) for _ in range(10)], rng.choice([*few, "maybe", "YES."])
        assert soft_score(text, answers) == pytest.approx(agreement(text, answers), abs=1e-12)
        processed = for_upload(text)
        people = [for_upload(one) for one in answers]
        assert textvqa_score(text, answers) == pytest.approx(agreement(processed, people), abs=1e-12)
        lines = [one.replace("\t", " ") for one in answers]
        people = [plain(one) for one in lines] if len(set(lines)) > 1 else lines
        uploaded = plain(processed) if len(set(lines)) > 1 else processed
        assert vqav2_score(processed_answer(text), answers) == pytest.approx(agreement(uploaded, people), abs=1e-12)
        assert vizwiz_score(processed, answers) == pytest.approx(agreement(plain(processed), answers), abs=1e-12)


def test_where_all_people_agree_nothing_is_simplified():
    assert vqav2_score("cat", ["The cat"] * 10) == 0.0
    assert vqav2_score("cat", ["The cat"] * 9 + ["x"]) == 1.0
    assert vizwiz_score("cat", ["The cat"] * 9 + ["x"]) == 0.0
