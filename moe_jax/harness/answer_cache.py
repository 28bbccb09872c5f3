"""Answers of a model to the requests of tasks, in a file, so that none is asked for twice."""

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import hash_args

from moe_jax.core.errors import InputError, first_sentence

Answer = tuple[float, bool] | float | str


class AnswerCache:
    """Answers to requests, in a file, so that an interrupted or repeated evaluation does not ask again.

    The file is an SQLite database of JSON, created if there is none; lm-eval's own cache consists of pickles, which
    execute their content. Answers of several models may be in the same file. Raises `InputError` if there is something
    else at the path.
    """

    def __init__(self, path: Path, model: str):
        self._path, self._model = path, model
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self._database = sqlite3.connect(path, isolation_level=None)
            self._database.execute("PRAGMA synchronous = OFF")
            columns = "request TEXT PRIMARY KEY, answer TEXT NOT NULL"
            self._database.execute(f"CREATE TABLE IF NOT EXISTS answers ({columns})")

    def close(self) -> None:
        """Closes the file; the cache cannot be used afterwards."""
        self._database.close()

    def find(self, kind: str, request: Sequence[Any]) -> Answer | None:
        """Returns the stored answer to a request; None if there is none."""
        key = hash_args(kind, [self._model, *request])
        with self._errors():
            row = self._database.execute("SELECT answer FROM answers WHERE request = ?", (key,)).fetchone()
        if row is None:
            return None
        try:
            return _CHECKS[kind](json.loads(row[0]))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{self._path} holds no answers: {first_sentence(error)}") from None

    def keep(self, kind: str, request: Sequence[Any], answer: Answer) -> None:
        """Stores an answer."""
        row = hash_args(kind, [self._model, *request]), json.dumps(answer)
        with self._errors():
            self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", row)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise InputError(f"{self._path} cannot be used as a cache of answers: {first_sentence(error)}") from None


def _likelihood(value: Any) -> Answer:
    number, is_greedy = value
    if not isinstance(is_greedy, bool):
        raise TypeError("expected a number and a truth value")
    return _number(number), is_greedy


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("expected a number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected a text")
    return value


_CHECKS: dict[str, Callable[[Any], Answer]] = {
    "loglikelihood": _likelihood,
    "loglikelihood_rolling": _number,
    "generate_until": _text,
}
