"""Answers of a model to requests, kept in a file, so that an interrupted or repeated evaluation does not ask again.

The file is an SQLite database of JSON. lm-eval's own cache consists of pickles, which execute their content.
"""

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
    """Answers by request.

    Args:
      path: of the file, which is created if there is none.
      model: identifies the model, as answers of several models may be in the same file.

    Raises:
      InputError: if there is something else at the path.
    """

    def __init__(self, path: Path, model: str):
        self._path, self._model = path, model
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self._database = sqlite3.connect(path, isolation_level=None)
            self._database.execute("PRAGMA synchronous = OFF")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, answer TEXT NOT NULL)"
            )

    def close(self) -> None:
        """Closes the file; the cache cannot be used afterwards."""
        self._database.close()

    def find(self, kind: str, request: Sequence[Any]) -> Answer | None:
        """Returns the stored answer to a request; None if there is none.

        Raises:
          InputError: if the stored answer is not of this kind.
        """
        with self._errors():
            row = self._database.execute(
                "SELECT answer FROM answers WHERE request = ?", (self._key(kind, request),)
            ).fetchone()
        if row is None:
            return None
        try:
            return _CHECKS[kind](json.loads(row[0]))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{self._path} holds no answers: {first_sentence(error)}") from None

    def keep(self, kind: str, request: Sequence[Any], answer: Answer) -> None:
        """Stores an answer."""
        with self._errors():
            self._database.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?)", (self._key(kind, request), json.dumps(answer))
            )

    def _key(self, kind: str, request: Sequence[Any]) -> str:
        return hash_args(kind, [self._model, *request])

    def _errors(self) -> contextlib.AbstractContextManager:
        return _as_input_errors(self._path)


@contextlib.contextmanager
def _as_input_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise InputError(f"{path} cannot be used as a cache of answers: {first_sentence(error)}") from None


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
