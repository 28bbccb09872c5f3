"""VQAv2, VizWiz, TextVQA, GQA and POPE: questions with answers of a word or two."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from moe_jax.core.bad_documents import BadDocument
from moe_jax.core.errors import InputError, shown
from moe_jax.evaluation.chosen_answers import YesNo, gqa_prediction, says_yes, yes_no
from moe_jax.evaluation.vqa_answers import (
    NUM_ANSWERS,
    processed_answer,
    textvqa_score,
    vizwiz_score,
    vqav2_score,
)
from moe_jax.harness.pictures.question_set import (
    Answered,
    Document,
    QuestionSet,
    Reader,
    by_key,
    entries_of,
    fields_of,
    found_in,
    id_of,
    none_of,
    only,
    text_of,
)

_ANNOTATIONS = "annotations (dataset_kwargs.annotations)"


def _answers(given: Any) -> list[str]:
    """Returns what ten people answered, each a text or an object with one as `answer`."""
    said = [one.get("answer") if isinstance(one, dict) else one for one in given] if isinstance(given, list) else []
    found = [one for one in said if isinstance(one, str)]
    if len(said) != NUM_ANSWERS or len(found) != NUM_ANSWERS:
        raise BadDocument(f"its answers are {shown(given)}, expected those of {NUM_ANSWERS} people")
    return found


class VQAv2(QuestionSet):
    """VQAv2, whose answers are public for its validation split only."""

    judged_by = "answers"

    def reader(self, annotations: Mapping[str, Any]) -> Reader:
        """Reads questions of LLaVA's form or its own, and the answers of its own annotations, if they are given."""
        table = None
        if annotations:
            table = by_key(entries_of(only(annotations, "of answers"), _ANNOTATIONS, "annotations"), "question_id",
                           _ANNOTATIONS)  # fmt: skip

        def read(entry: Document) -> dict[str, Any]:
            made = fields_of(entry) | {"question_id": id_of(entry)}
            if table is not None:
                made["answers"] = _answers(found_in(table, made["question_id"], _ANNOTATIONS).get("answers"))
            return made

        return read

    def score(self, document: Document, text: str) -> dict[str, Any]:
        """Returns the soft score of the processed answer."""
        return {"acc": vqav2_score(processed_answer(text), document["answers"])}

    def upload(self, answered: Sequence[Answered]) -> str:
        """Returns the JSON that EvalAI takes."""
        rows = [{"question_id": one["question_id"], "answer": processed_answer(text)} for one, text in answered]
        return json.dumps(rows)


class VizWiz(QuestionSet):
    """VizWiz, whose entries have their answers, but for those of its test split."""

    judged_by = "answers"

    def reader(self, annotations: Mapping[str, Any]) -> Reader:
        """Reads questions of LLaVA's form or its own."""
        none_of(annotations)

        def read(entry: Document) -> dict[str, Any]:
            answers = {"answers": _answers(entry["answers"])} if "answers" in entry else {}
            return fields_of(entry) | {"image": text_of(entry, "image")} | answers

        return read

    def score(self, document: Document, text: str) -> dict[str, Any]:
        """Returns the soft score of the processed answer."""
        return {"acc": vizwiz_score(processed_answer(text), document["answers"])}

    def upload(self, answered: Sequence[Answered]) -> str:
        """Returns the JSON that EvalAI takes."""
        return json.dumps([{"image": one["image"], "answer": processed_answer(text)} for one, text in answered])


class TextVQA(QuestionSet):
    """TextVQA: questions of LLaVA's form, whose ids are those of pictures, and its own annotations."""

    judged_by = "answers"

    def reader(self, annotations: Mapping[str, Any]) -> Reader:
        """Finds answers by the picture and the question, which is cut out of the prompt."""
        table: dict[Any, Document] = {}
        for number, entry in enumerate(entries_of(only(annotations, "of answers"), _ANNOTATIONS, "data"), start=1):
            if not isinstance(entry.get("image_id"), str) or not isinstance(entry.get("question"), str):
                raise InputError(f"{_ANNOTATIONS}, entry {number}: expected an image_id and a question")
            table[entry["image_id"], entry["question"].lower()] = entry

        def read(entry: Document) -> dict[str, Any]:
            name = id_of(entry), _question_of(text_of(entry, "text")).lower()
            return fields_of(entry) | {"answers": _answers(found_in(table, name, _ANNOTATIONS).get("answers"))}

        return read

    def score(self, document: Document, text: str) -> dict[str, Any]:
        """Returns the soft score."""
        return {"acc": textvqa_score(text, document["answers"])}


def _question_of(prompt: str) -> str:
    """Returns the question in a prompt of LLaVA's file for TextVQA, with or without what an OCR system read."""
    lines = prompt.split("\n")
    if prompt.startswith("OCR tokens: "):
        found = re.search("Question: (.*?) Short answer:", prompt, re.DOTALL)
        if found:
            return found[1]
    elif "Reference OCR token: " in prompt and len(lines) == 3:
        return lines[prompt.startswith("Reference OCR token:")]
    elif len(lines) == 2:
        return lines[0]
    raise BadDocument(f"its text {shown(prompt)} has no question that can be told from the rest")


class GQA(QuestionSet):
    """GQA: questions of LLaVA's form, and its own file of questions with their answers."""

    def reader(self, annotations: Mapping[str, Any]) -> Reader:
        """Finds answers by the id of a question."""
        table = only(annotations, "of questions with their answers")
        if not isinstance(table, dict) or not table:
            raise InputError(f"{_ANNOTATIONS}: expected an object of questions by their ids")

        def read(entry: Document) -> dict[str, Any]:
            found = found_in(table, str(id_of(entry)), _ANNOTATIONS)
            if not isinstance(found, dict):
                raise BadDocument(f"its annotation is {shown(found)}, expected an object")
            return fields_of(entry) | {"answer": text_of(found, "answer")}

        return read

    def score(self, document: Document, text: str) -> dict[str, Any]:
        """Returns whether the answer is the right one."""
        return {"acc": float(gqa_prediction(text) == document["answer"])}

    def upload(self, answered: Sequence[Answered]) -> str:
        """Returns the predictions that the set's own program reads."""
        return json.dumps(
            [{"questionId": one["question_id"], "prediction": gqa_prediction(text)} for one, text in answered]
        )


_CATEGORIES = ("adversarial", "popular", "random")


def _of_category(figure: str) -> Callable[[Sequence[Any]], float]:
    return lambda pairs: getattr(yes_no(pairs), figure)


def _mean_f1(values: Sequence[tuple[str, bool, bool]]) -> float:
    """The mean of the F1 of all categories."""
    pairs: dict[str, list[tuple[bool, bool]]] = {}
    for category, said, true in values:
        pairs.setdefault(category, []).append((said, true))
    return sum(yes_no(one).f1 for one in pairs.values()) / len(pairs)


def _names_question(label: Document, entry: Document) -> bool:
    """Whether a label names the picture and the question of an entry, which a line follows on how to answer."""
    text = entry.get("text")
    question = text.split("\n")[0] if isinstance(text, str) else None
    return (label.get("image"), label.get("text")) == (entry.get("image"), question)


class POPE(QuestionSet):
    """POPE: questions of LLaVA's form, and a file of labels for every category, in the order of its questions."""

    figures: ClassVar = {
        f"{figure}_{category}": _of_category(figure) for category in _CATEGORIES for figure in YesNo._fields
    } | {"f1": _mean_f1}

    def reader(self, annotations: Mapping[str, Any]) -> Reader:
        """Finds the label of a question among those of its category that come after the label of the one before."""
        if not annotations or annotations.keys() - set(_CATEGORIES):
            raise InputError(f"dataset_kwargs.annotations: expected files for {', '.join(_CATEGORIES)}")
        labels = {name: list(entries_of(given, f"labels of {name}")) for name, given in annotations.items()}

        def read(entry: Document) -> dict[str, Any]:
            category = text_of(entry, "category")
            if category not in labels:
                raise BadDocument(f"its category is {shown(category)}, and there are labels of {', '.join(labels)}")
            left = labels[category]
            if not left:
                raise BadDocument(f"there are fewer labels than questions of the category {category!r}")
            # Files whose labels have other words are in the same order.
            place = next((number for number, label in enumerate(left) if _names_question(label, entry)), 0)
            if left[place].get("image", entry.get("image")) != entry.get("image"):
                raise BadDocument(
                    f"its picture is {shown(entry.get('image'))}, and that of the next label "
                    f"{shown(left[0].get('image'))}: questions and labels of a category must be in the same order"
                )
            label = left[place]
            del left[: place + 1]  # those of questions that could not be read, too
            if label.get("label") not in ("yes", "no"):
                raise BadDocument(f"its label is {shown(label.get('label'))}, expected yes or no")
            named = {"question_id": id_of(entry), "text": text_of(entry, "text"), "category": category}
            return fields_of(entry) | named | {"answer": label["label"]}

        return read

    def score(self, document: Document, text: str) -> dict[str, Any]:
        """Returns what was said and what is true, for every figure of the category."""
        category, said, true = document["category"], says_yes(text), document["answer"] == "yes"
        return {f"{figure}_{category}": (said, true) for figure in YesNo._fields} | {"f1": (category, said, true)}
