"""Examples from rows of data: a text, a prompt and its response, or a conversation.

Rows are objects of a JSON file, or rows of a table. The keys that hold the content are known by their names, or given.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_jax.core.errors import InputError, clipped, shown
from moe_jax.data.chat_template import ChatTemplate
from moe_jax.data.sections import FieldsSection
from moe_jax.files.json_toml import is_unicode

PAIR_KEYS = (("prompt", "response"), ("input", "target"))
"""Keys of rows that are pairs: the input, and the response to it."""

CHAT_KEYS = ("messages", "conversations")
"""Keys of rows that are conversations."""

# Names of roles in conversations of ShareGPT and of data sets in its format.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_ROLE_KEYS = (("role", "content"), ("from", "value"))


class Example(NamedTuple):
    """A document, or a part of one.

    Attributes:
      text: the text.
      prompt_chars: characters at its beginning that are not scored.
      begins, ends: whether the document begins and ends here; otherwise it continues in a neighbouring record.
      is_response: whether it is an answer to a prompt.
      spans: in a conversation, begin and end of the scored parts, in characters, in order. The text of a conversation
        has all its special tokens already.
    """

    text: str
    prompt_chars: int = 0
    begins: bool = True
    ends: bool = True
    is_response: bool = False
    spans: tuple[tuple[int, int], ...] | None = None


class Document(NamedTuple):
    """A document, or a part of one, as tokens: ids Int32[n], and scored Float32[n], 0 for tokens that are not."""

    ids: np.ndarray
    scored: np.ndarray


class RowReader:
    """Makes examples from rows.

    Args:
      fields: the keys that hold the content; None: known by their names, and a row may have keys of one kind only.
      template: returns the template that conversations are written with; called when the first conversation comes.
      chat: pairs are written with the template as well, as a conversation of two turns.
      kinds: the kinds of rows that are accepted.
    """

    def __init__(
        self,
        fields: FieldsSection | None = None,
        *,
        template: Callable[[], ChatTemplate] | None = None,
        chat: bool = False,
        kinds: Sequence[str] = ("text", "pair", "chat"),
    ):
        self._template = template
        self._chat = chat
        self._role_keys = _ROLE_KEYS
        by_kind = {"text": (("text",),), "pair": PAIR_KEYS, "chat": tuple((key,) for key in CHAT_KEYS)}
        if fields is not None:
            by_kind = {kind: (keys,) if keys else () for kind, keys in fields.keys_by_kind().items()}
            self._role_keys = ((fields.role, fields.content),)
        self._kind_of = {keys: kind for kind in kinds for keys in by_kind[kind]}
        self._is_told = fields is not None
        self._known = {"text", *itertools.chain(*PAIR_KEYS), *CHAT_KEYS}

    @property
    def keys(self) -> frozenset[str]:
        """All keys of rows that are read."""
        return frozenset(itertools.chain(*self._kind_of))

    @property
    def expected(self) -> str:
        """The rows that are accepted, in words."""

        def shape(keys: tuple[str, ...]) -> str:
            value = "[...]" if self._kind_of[keys] == "chat" else '"..."'
            return "{" + ", ".join(f'"{clipped(key)}": {value}' for key in keys) + "}"

        return " or ".join(map(shape, self._kind_of))

    def __call__(self, row: Any) -> list[Example]:
        """Returns the examples of a row: one, or for a conversation as many as `ChatTemplate.scored` returns.

        Raises:
          InputError: if the row holds something else.
        """
        if not isinstance(row, Mapping):
            raise InputError(f"expected {self.expected}, got a JSON {type(row).__name__}")
        known = {key for key in self._known & row.keys() if row[key] is not None}
        of_row = next((keys for keys in self._kind_of if known == set(keys)), None)
        if self._is_told:
            of_row = next((keys for keys in self._kind_of if set(keys) <= row.keys()), None)
        if of_row is None:
            keys = clipped(", ".join(map(shown, row))) or "(none)"
            told = "" if self._is_told or not row else "; a source's fields = { ... } says which keys hold what"
            raise InputError(f"expected {self.expected}, got an object with the keys {keys}{told}")
        kind = self._kind_of[of_row]
        if kind == "chat":
            messages = row[of_row[0]]
            if not isinstance(messages, list) or not messages:
                got = f"{shown(of_row[0])} holding {shown(messages)} that should be a list of messages"
                raise InputError(f"expected {self.expected}, got {got}")
            return self._conversation([self._message(one, number) for number, one in enumerate(messages, start=1)])
        for key in sorted(of_row):
            got = None
            if not isinstance(row[key], str):
                got = f"a {type(row[key]).__name__} that should be a string"
            elif not is_unicode(row[key]):
                got = "one half of a character in UTF-16"
            if got is not None:
                raise InputError(f"expected {self.expected}, got {shown(key)} holding {got}")
        if kind == "text":
            return [Example(row[of_row[0]])]
        prompt, response = (row[key] for key in of_row)
        if self._chat:
            question, answer = {"role": "user", "content": prompt}, {"role": "assistant", "content": response}
            return self._conversation([question, answer])
        return [Example(prompt + response, len(prompt), is_response=True)]

    def _conversation(self, messages: list[dict[str, Any]]) -> list[Example]:
        if self._template is None:
            raise InputError("a conversation needs a tokenizer with a chat template")
        return [Example(scored.text, spans=scored.spans) for scored in self._template().scored(messages)]

    def _message(self, message: Any, number: int) -> dict[str, Any]:
        """Converts a message to the form that chat templates take; null values, as tables have them, are left out."""
        if not isinstance(message, Mapping):
            raise InputError(f"message {number} is {shown(message)}, expected an object")
        names = next((names for names in self._role_keys if names[0] in message), None)
        if names is None:
            wanted = " or ".join(shown(role) for role, _ in self._role_keys)
            raise InputError(f"message {number} has no {wanted}, but {clipped(', '.join(map(shown, message)))}")
        role, content = (message.get(name) for name in names)
        others = {key: item for key, item in message.items() if key not in names and item is not None}
        known = _ROLES.get(role, role) if isinstance(role, str) else role
        return {"role": known, "content": content, **others}
