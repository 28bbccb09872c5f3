"""Single entries of files of questions: forms of prompts, files that a set lacks or has not, letters, alphabets."""

import json

import pytest

from moe_jax.core.errors import InputError
from moe_jax.harness.pictures.question_set import Answered
from moe_jax.harness.pictures.scoring import SETS
from tests.support.picture_questions import SHORT, people


@pytest.mark.parametrize(
    "prompt",
    [
        f"What is it?{SHORT}",
        f"What is it?\nReference OCR token: A, B{SHORT}",
        f"Reference OCR token: A, B\nWhat is it?{SHORT}",
        "OCR tokens: A, B. Question: What is it? Short answer:",
    ],
)
def test_the_question_in_prompts_of_textvqa(prompt):
    table = {"data": [{"image_id": "p", "question": "what is IT?", "answers": ["x"] * 10}]}
    read = SETS["textvqa"].reader({"": table})
    document = read({"question_id": "p", "text": prompt})
    assert document is not None and document["answers"] == ["x"] * 10


@pytest.mark.parametrize(
    "prompt", ["What is it?", "OCR tokens: A. What is it?", "a\nb\nc", "a\nb\nc\nReference OCR token: "]
)
def test_prompts_of_textvqa_without_a_question(prompt):
    read = SETS["textvqa"].reader({"": {"data": [{"image_id": "p", "question": "x", "answers": ["x"] * 10}]}})
    with pytest.raises(InputError, match="has no question"):
        read({"question_id": "p", "text": prompt})


@pytest.mark.parametrize("name", ["vizwiz", "mmbench", "mmvet", "medical"])
def test_sets_without_annotations_take_none(name):
    with pytest.raises(InputError, match="set has none"):
        SETS[name].reader({"": [{}]})


@pytest.mark.parametrize("name", ["textvqa", "gqa", "scienceqa_img", "pope"])
@pytest.mark.parametrize("files", [{}, {"more": {"a": {}}}])
def test_sets_with_annotations_need_theirs(name, files):
    with pytest.raises(InputError, match=r"dataset_kwargs\.annotations: expected"):
        SETS[name].reader(files)


def test_labels_of_some_categories_are_enough():
    read = SETS["pope"].reader({"random": [{"image": "a.png", "label": "no"}]})
    entry = {"question_id": 1, "image": "a.png", "text": "Is there?", "category": "random"}
    document = read(entry)
    assert document is not None and document["answer"] == "no"
    with pytest.raises(InputError, match="fewer labels"):
        read(entry)
    with pytest.raises(InputError, match="label is .maybe"):
        SETS["pope"].reader({"random": [{"label": "maybe"}]})(entry)


def test_a_question_that_could_not_be_read_takes_only_its_own_label_with_it():
    pairs = [(f"{picture}.png", f"Is there {what}?") for picture in "ab" for what in ("x", "y", "z")]
    labels = [{"image": image, "text": text, "label": "yes" if "y" in text else "no"} for image, text in pairs]
    read = SETS["pope"].reader({"random": labels})
    for number in (0, 2, 3, 4):
        image, text = pairs[number]
        entry = {"question_id": number, "image": image, "text": f"{text}\nAnswer yes or no.", "category": "random"}
        assert read(entry)["answer"] == labels[number]["label"]
    with pytest.raises(InputError, match="same order"):
        read({"question_id": 9, "image": "a.png", "text": "Is there x?", "category": "random"})


def test_answers_of_scienceqa_without_a_letter():
    problem = {"choices": list("abcdef"), "answer": 5}
    read = SETS["scienceqa_img"].reader({"": {"1": problem}})
    with pytest.raises(InputError, match="number 5"):
        read({"id": "1", "image": "a.png", "conversations": [{"value": "Which?"}]})


def test_answers_of_ten_people_are_texts_or_objects():
    read = SETS["vizwiz"].reader({})
    for answers in (people("x", 4), ["x"] * 10):
        document = read({"image": "a.png", "question": "?", "answers": answers})
        assert document is not None and document["answers"].count("x") == sum(
            one in ("x", {"answer": "x"}) for one in answers
        )
    for wrong in (["x"] * 9, ["x"] * 9 + [1], ["x"] * 11, "x" * 10, None):
        with pytest.raises(InputError, match="those of 10 people"):
            read({"image": "a.png", "question": "?", "answers": wrong})


def test_other_alphabets_stay_what_they_are():
    document = {"question_id": 1, "text": "何?", "image": "a.png"}
    assert "猫" in SETS["mmvet"].upload([Answered(document, "猫")])
    line = SETS["medical"].upload([Answered(document, "猫")])
    assert "猫" in line and json.loads(line) == {"question_id": 1, "prompt": "何?", "text": "猫"}
