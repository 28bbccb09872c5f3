"""ScienceQA, MMBench, MM-Vet, and the medical VQA-RAD, SLAKE and PathVQA."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from moe_jax.core.bad_documents import BadDocument
from moe_jax.core.errors import InputError, shown
from moe_jax.data.pictures.picture_sources import MARK
from moe_jax.evaluation.chosen_answers import LETTERS, chosen_letter
from moe_jax.evaluation.medical_answers import CLOSED, OPEN, holds_truth, word_recall
from moe_jax.harness.pictures.question_set import (
    Answered,
    Document,
    QuestionSet,
    Reader,
    fields_of,
    found_in,
    id_of,
    none_of,
    only,
    text_of,
)


def _said(entry: Document, number: int) -> str:
    """Returns what is said in a turn of a conversation, without the place of the picture."""
    # The second name is a mistake that some of the published files make.
    turns = entry.get("conversations", entry.get("conversatons"))
    turn = turns[number] if isinstance(turns, list) and len(turns) > number else None
    if not isinstance(turn, dict):
        raise BadDocument(f"its conversations are {shown(turns)}, expected a question and an answer")
    return text_of(turn, "value").replace(MARK, "").strip()


class ScienceQAImages(QuestionSet):
    """The questions of ScienceQA that have a picture: conversations of LLaVA's file, and the set's own problems."""

    def reader(self, annotations: Mapping[str, Any]) -> Reader:
        """Finds options and right answers by the id of a problem."""
        problems = only(annotations, "of problems")
        if not isinstance(problems, dict) or not problems:
            raise InputError("dataset_kwargs.annotations: expected an object of problems by their ids")

        def read(entry: Document) -> dict[str, Any] | None:
            if "image" not in entry:
                return None
            problem = found_in(problems, str(id_of(entry, "id")), "problems (dataset_kwargs.annotations)")
            choices, answer = (problem.get(key) if isinstance(problem, dict) else None for key in ("choices", "answer"))
            if not isinstance(choices, list) or not isinstance(answer, int) or not 0 <= answer < len(choices):
                raise BadDocument(f"its problem is {shown(problem)}, expected choices, and the number of the answer")
            if answer >= len(LETTERS):
                raise BadDocument(f"its answer is number {answer} (from 0), and answers have the letters {LETTERS}")
            text = _said(entry, 0)
            return {
                **{"question_id": entry["id"], "image": text_of(entry, "image"), "text": text},
                **{"prompt": f"{MARK}\n{text}", "options": len(choices), "answer": LETTERS[answer]},
            }

        return read

    def score(self, document: Document, text: str) -> dict[str, Any]:
        """Returns whether the letter is the right one."""
        return {"acc": float(chosen_letter(text, document["options"]) == document["answer"])}


_MMBENCH = LETTERS[:4]
_UPLOADED = ("index", "question", *_MMBENCH, "prediction", "answer")


class MMBench(QuestionSet):
    """MMBench: its table, which holds the pictures. What its server says is stricter: it turns the options round."""

    def reader(self, annotations: Mapping[str, Any]) -> Reader:
        """Joins a hint, the question and the options to one text."""
        none_of(annotations)

        def read(entry: Document) -> dict[str, Any]:
            index = entry.get("index")
            if not str(index).isdecimal():
                raise BadDocument(f"its index is {shown(index)}, expected a number")
            question = text_of(entry, "question")
            options: list[str] = []
            for letter in _MMBENCH:
                if _is_none(entry.get(letter)):
                    break
                options.append(str(entry[letter]))
            lines = [*([] if _is_none(entry.get("hint")) else [str(entry["hint"])]), question]
            lines += [f"{letter}. {option}" for letter, option in zip(_MMBENCH, options, strict=False)]
            answer = entry.get("answer")
            return {
                **{"question_id": int(str(index)), "question": question, "text": "\n".join(lines), "options": options},
                **{"image": f"data:image/jpeg;base64,{text_of(entry, 'image')}"},
                "answer": None if _is_none(answer) else answer,
            }

        return read

    def score(self, document: Document, text: str) -> dict[str, Any]:
        """Returns whether the letter is the right one."""
        return {"acc": float(chosen_letter(text, len(document["options"])) == document["answer"])}

    def upload(self, answered: Sequence[Answered]) -> str:
        """Returns the columns of the table that the server takes, as text with tabs."""
        file = io.StringIO()
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(_UPLOADED)
        for one, text in answered:
            options = [*one["options"], *[""] * (len(_MMBENCH) - len(one["options"]))]
            table.writerow([one["question_id"], one["question"], *options, text, one["answer"] or ""])
        return file.getvalue()


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("", "nan", "none"))


class MMVet(QuestionSet):
    """MM-Vet, whose answers another model grades, which is not done here."""

    judged_by = None
    figures: ClassVar = {"bypass": "bypass"}

    def reader(self, annotations: Mapping[str, Any]) -> Reader:
        """Takes the entries as they are."""
        none_of(annotations)
        return lambda entry: fields_of(entry) | {"question_id": id_of(entry)}

    def score(self, document: Document, text: str) -> dict[str, Any]:
        """Returns no figure, for none is made here."""
        return {}

    def upload(self, answered: Sequence[Answered]) -> str:
        """Returns the JSON that the grader reads."""
        return json.dumps({f"v1_{one['question_id']}": text for one, text in answered}, indent=2, ensure_ascii=False)


class Medical(QuestionSet):
    """VQA-RAD, SLAKE and PathVQA in the files of Med-MoE: conversations with the type of the answer."""

    figures: ClassVar = {"recall_open": "mean", "acc_closed": "mean"}

    def reader(self, annotations: Mapping[str, Any]) -> Reader:
        """Takes question and answer from the two turns of a conversation."""
        none_of(annotations)

        def read(entry: Document) -> dict[str, Any]:
            kind = entry.get("answer_type")
            if kind not in (*OPEN, *CLOSED):
                raise BadDocument(f"its answer_type is {shown(kind)}, expected {', '.join((*OPEN, *CLOSED))}")
            text, image = _said(entry, 0), entry.get("image")
            return {
                **{"question_id": id_of(entry, "id"), "image": image, "text": text, "answer": _said(entry, 1)},
                **{"prompt": text if image is None else f"{MARK}\n{text}", "is_closed": kind in CLOSED},
            }

        return read

    def score(self, document: Document, text: str) -> dict[str, Any]:
        """Returns the recall of an open answer, or whether a closed one is right."""
        if document["is_closed"]:
            return {"acc_closed": float(holds_truth(text, document["answer"]))}
        return {"recall_open": word_recall(text, document["answer"])}
