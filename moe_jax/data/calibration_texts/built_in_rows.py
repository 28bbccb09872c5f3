"""The texts that come with the library: prose, code, mathematics and conversations; PROVENANCE.md says whose they are.

They are rows of JSON, as in training data. A model without a chat template reads conversations as the text of a play.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_jax.data.chat_template import ChatTemplate
from moe_jax.data.rows import Example, RowReader

FOLDER = Path(__file__).parent / "built_in"
"""The folder of the texts."""
KINDS = ("prose", "code", "mathematics", "chats")
"""Names of the files, of which as much is drawn of each as it has."""
_QUESTIONS = FOLDER / "questions.txt"


@functools.cache
def questions() -> tuple[str, ...]:
    """Returns short questions of a user, to begin conversations with."""
    return tuple(_QUESTIONS.read_text("utf-8").splitlines())


def built_in_examples(template: ChatTemplate | None, *, seed: int) -> Iterator[Example]:
    """Yields the texts in an order of the seed: one of each kind in turn, as long as there are any.

    Args:
      template: of the tokenizer, for conversations; None: it has none.
      seed: of the order.
    """
    reader = RowReader(template=None if template is None else lambda: template)
    draw = np.random.Generator(np.random.Philox(seed))
    left = [list(draw.permutation(len(rows))) for rows in map(_rows, KINDS)]
    while any(left):
        for kind, numbers in zip(KINDS, left, strict=True):
            if numbers:
                row = _rows(kind)[numbers.pop()]
                yield from reader(_as_text(row) if template is None and "messages" in row else row)


@functools.cache
def _rows(kind: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{kind}.jsonl").read_text("utf-8").splitlines()]


def _as_text(row: dict[str, Any]) -> dict[str, str]:
    turns = (f"{message['role'].capitalize()}: {message['content']}" for message in row["messages"])
    return {"text": "\n\n".join(turns)}
