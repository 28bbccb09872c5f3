"""A set of questions about pictures: how its files are read, its answers scored, and what its server is given."""

import abc
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from moe_jax.core.bad_documents import BadDocument
from moe_jax.core.errors import InputError, shown

Document = Mapping[str, Any]
Reader = Callable[[Document], dict[str, Any] | None]
"""Makes the document of an entry of a file of questions; None: it is not of the set. Raises `BadDocument`."""


class Answered(NamedTuple):
    """A document, and what the model wrote."""

    document: Document
    text: str


class QuestionSet(abc.ABC):
    """Questions in files of one form.

    Attributes:
      figures: the name of every figure, and how it is made of the values that documents have: a name of lm-eval's, or
        a function.
      judged_by: the field without which a document has no score; None: no answer is scored here.
    """

    figures: ClassVar[Mapping[str, str | Callable[[Sequence[Any]], float]]] = {"acc": "mean"}
    judged_by: ClassVar[str | None] = "answer"

    @abc.abstractmethod
    def reader(self, annotations: Mapping[str, Any]) -> Reader:
        """Returns a function that makes documents of the entries of a file of questions, called in their order.

        Args:
          annotations: the contents of files with answers, by name; one without a name is under "".

        Raises:
          InputError: for annotations that are none.
        """

    @abc.abstractmethod
    def score(self, document: Document, text: str) -> dict[str, Any]:
        """Returns the value of every figure for an answer; none for what the figure leaves out."""

    def upload(self, answered: Sequence[Answered]) -> str:
        """Returns the file for the set's own programs: here the answers of LLaVA's form."""
        rows = (
            {"question_id": document["question_id"], "prompt": _prompt(document), "text": text}
            for document, text in answered
        )
        return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def _prompt(document: Document) -> str:
    return document.get("prompt") or document["text"]


def fields_of(entry: Document) -> dict[str, Any]:
    """Returns the fields of an entry that are texts and numbers, and pictures that are a list of names."""
    return {
        key: value
        for key, value in entry.items()
        if value is None or isinstance(value, str | int | float) or key == "image"
    }


def id_of(entry: Document, key: str = "question_id") -> str | int:
    """Returns the id of an entry; raises `BadDocument` if it has none."""
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadDocument(f"its {key!r} is {shown(value)}, expected a text or a number")
    return value


def text_of(entry: Document, key: str) -> str:
    """Returns a text of an entry; raises `BadDocument` if it has none."""
    value = entry.get(key)
    if not isinstance(value, str) or not value.strip():
        raise BadDocument(f"its {key!r} is {shown(value)}, expected a text")
    return value


def entries_of(value: Any, what: str, key: str | None = None) -> list[dict[str, Any]]:
    """Returns a list of objects, or that under the key of an object; raises `InputError` for anything else."""
    if isinstance(value, dict):
        value = [value] if key is None else value.get(key)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        inside = "" if key is None else f", or an object with them as {key!r}"
        raise InputError(f"{what}: expected a list of objects{inside}")
    if not value:
        raise InputError(f"{what}: there are none")
    return value


def by_key(entries: Sequence[Document], key: str, what: str) -> dict[Any, Document]:
    """Returns entries by a field of theirs; raises `InputError` if one lacks it, or two have the same."""
    found: dict[Any, Document] = {}
    for number, entry in enumerate(entries, start=1):
        name = entry.get(key)
        if not isinstance(name, str | int) or name in found:
            why = "is in another one too" if isinstance(name, str | int) else "names none"
            raise InputError(f"{what}, entry {number}: its {key!r} {shown(name)} {why}")
        found[name] = entry
    return found


def found_in(table: Mapping[Any, Any], name: Any, what: str) -> Any:
    """Returns an entry of a table; raises `BadDocument` if it has none of this name."""
    try:
        return table[name]
    except (KeyError, TypeError):
        raise BadDocument(f"question {shown(name)} is not in the {what}") from None


def only(annotations: Mapping[str, Any], what: str) -> Any:
    """Returns the content of the one file of annotations; raises `InputError` if none or several are given."""
    if annotations.keys() != {""}:
        raise InputError(f"dataset_kwargs.annotations: expected one file, {what}")
    return annotations[""]


def none_of(annotations: Mapping[str, Any]) -> None:
    """Raises `InputError` if there are annotations, where questions have their answers, or nobody has them."""
    if annotations:
        raise InputError("dataset_kwargs.annotations: this set has none")
