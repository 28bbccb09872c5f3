"""Answers that are one of a few, against the published programs said again in other words."""

import random

import pytest

from moe_jax.evaluation.chosen_answers import chosen_letter, gqa_prediction, says_yes, yes_no


def drawn(pieces, count=300, most=7):
    rng = random.Random(1)
    return ["".join(rng.choice(pieces) for _ in range(rng.randint(0, most))) for _ in range(count)]


def test_gqa_compares_small_letters_without_last_periods():
    for text in drawn(["Yes", ".", "..", " ", "left", "É", ".\n"]):
        end = len(text)
        while end and text[end - 1] == ".":
            end -= 1
        assert gqa_prediction(text) == text[:end].lower()


def test_pope_hears_no_in_the_first_sentence_only():
    for text in drawn(["No", "no", "not", "NO", "Yes", "none", " ", ",", ".", "\n", "knot"]):
        sentence = text[: text.index(".")] if "." in text else text
        heard, word = False, ""
        for character in sentence + " ":
            if character == " ":
                heard, word = heard or word in ("No", "no", "not"), ""
            elif character != ",":
                word += character
        assert says_yes(text) is not heard, text
    assert says_yes("Yes. No.") and says_yes("NO") and says_yes("no\nyes") and not says_yes("Well, no")
    assert says_yes("Well,no")


def test_figures_of_yes_and_no():
    rng = random.Random(2)
    for _ in range(300):
        pairs = [(rng.random() < 0.6, rng.random() < 0.4) for _ in range(rng.randint(1, 12))]
        counts = {(said, true): sum(pair == (said, true) for pair in pairs) for said in (0, 1) for true in (0, 1)}
        right, wrong, missed = counts[1, 1], counts[1, 0], counts[0, 1]
        found = yes_no(pairs)
        assert found.accuracy == pytest.approx((right + counts[0, 0]) / len(pairs))
        assert found.precision == pytest.approx(right / (right + wrong) if right else 0)
        assert found.recall == pytest.approx(right / (right + missed) if right else 0)
        assert found.f1 == pytest.approx(2 * right / (2 * right + wrong + missed) if right else 0)
        assert found.yes == pytest.approx((right + wrong) / len(pairs))


def letter(text, options):
    """By hand: a letter alone, a letter before a period and a space, or the only sentence that says the answer."""
    found = ""
    if len(text) == 1 and text in "ABCDE":
        found = text
    elif text[1:3] == ". " and text[0] in "ABCDE":
        found = text[0]
    else:
        begin, said, at = "The answer is ", [], 0
        while (at := text.find(begin, at)) >= 0:
            after = text[at + len(begin) : at + len(begin) + 2]
            if len(after) == 2 and "A" <= after[0] <= "Z" and after[1] != "\n":
                said.append(after[0])
            at += len(begin)
        found = said[0] if len(said) == 1 else ""
    return found if found and found in "ABCDE"[:options] else None


def test_letters_of_options():
    pieces = [
        "A",
        "B",
        "C",
        "E",
        "F",
        ". ",
        ".",
        " ",
        "The answer is ",
        "The answer is B.",
        "the answer is A.",
        "\n",
        "x",
    ]
    for index, text in enumerate(drawn(pieces, most=4)):
        assert chosen_letter(text, 2 + index % 4) == letter(text, 2 + index % 4), text
    assert chosen_letter("C", 2) is None and chosen_letter("The answer is B!", 2) == "B"
    assert chosen_letter("B. two", 2) == "B" and chosen_letter("B.", 2) is None and chosen_letter("", 4) is None
    assert chosen_letter("The answer is A. The answer is A.", 4) is None
