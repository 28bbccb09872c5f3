"""Scores of answers to questions about medical pictures, VQA-RAD, SLAKE and PathVQA, as Med-MoE's figures are made."""

from collections import Counter

from moe_jax.evaluation.vqa_answers import simplified

OPEN, CLOSED = ("open", "OPEN"), ("close", "CLOSED")
"""Words for the two types of answers."""


def word_recall(text: str, truth: str) -> float:
    """Returns the recall of an open answer, after both were simplified.

    A shared word counts as often as the *answer* has it, a missing one as often as the truth has it, so that an answer
    which repeats a right word scores higher. An empty side gives 0.

        >>> from moe_jax.evaluation.medical_answers import word_recall
        >>> word_recall("lung", "left lung"), word_recall("lung lung lung", "left lung")
        (0.5, 0.75)
    """
    said, true = (Counter(simplified(one.lower()).split()) for one in (text, truth))
    found = sum(count for word, count in said.items() if word in true)
    missing = sum(count for word, count in true.items() if word not in said)
    return found / (found + missing) if found else 0.0


def holds_truth(text: str, truth: str) -> bool:
    """Whether a closed answer is right: the truth is anywhere in it, even inside of a word.

    >>> from moe_jax.evaluation.medical_answers import holds_truth
    >>> holds_truth("I do not know", "no")
    True
    """
    return truth.lower() in text.lower()
