"""Answers about medical pictures, against the published programs said again in other words."""

import random

import pytest

from moe_jax.evaluation.medical_answers import holds_truth, word_recall
from moe_jax.evaluation.vqa_answers import simplified

WORDS = ["lung", "left", "Left", "the", "a", "two", "2", "liver,", "CT", "mass.", "-", "x-ray", "no", "None", "0"]


def test_recall_counts_shared_words_as_often_as_the_answer_has_them():
    rng = random.Random(4)
    for _ in range(300):
        text, truth = (" ".join(rng.choice(WORDS) for _ in range(rng.randint(0, 6))) for _ in range(2))
        said, true = simplified(text.lower()).split(), simplified(truth.lower()).split()
        found = len([word for word in said if word in true])
        missing = len([word for word in true if word not in said])
        expected = found / (found + missing) if said and true and found else 0.0
        assert word_recall(text, truth) == pytest.approx(expected, abs=1e-12), (text, truth)
    assert word_recall("lung lung lung", "left lung") == 0.75 and word_recall("lung", "left lung") == 0.5
    # A word that the truth has twice is found with one.
    assert word_recall("lung", "lung lung left") == 0.5
    assert word_recall("", "x") == word_recall("x", "") == word_recall("the", "a") == 0.0


def test_a_closed_answer_holds_the_truth_even_inside_of_a_word():
    rng = random.Random(6)
    for _ in range(300):
        text, truth = " ".join(rng.choices(WORDS, k=4)), rng.choice([*WORDS, "ung l", "NO"])
        places = range(len(text) - len(truth) + 1)
        assert holds_truth(text, truth) == any(
            text[at : at + len(truth)].lower() == truth.lower() for at in places
        )  # fmt: skip
    assert holds_truth("I do not know", "no") and holds_truth("Yes", "YES") and not holds_truth("yes", "no")
