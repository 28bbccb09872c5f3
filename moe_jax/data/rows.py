"""Examples from rows of data: a text, a prompt and its response, or a conversation, in the forms of usual data sets.

Rows are objects of a JSON file, or rows of a table. The keys that hold the content are known by their names, or given.
Whatever else a row holds is used too, is known to say nothing about the content, or is an error that names it.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.core.errors import InputError, clipped, shown
from moe_jax.data.chat_template import ChatTemplate
from moe_jax.data.pictures.picture_messages import has_pictures, with_pictures
from moe_jax.data.pictures.picture_sources import MARK, PictureSource, check_places, pictures_of_row
from moe_jax.data.sections import FieldsSection
from moe_jax.files.json_toml import ANYTHING, is_unicode, parse_json

PAIR_KEYS = (("prompt", "response"), ("prompt", "completion"), ("input", "target"), ("instruction", "output"))
"""Keys of rows that are pairs: the input, and the response to it."""

CHAT_KEYS = ("messages", "conversations", "data", "conversatons")
"""Keys of rows that are conversations; the last one, so spelt, is in rows of Med-MoE."""

# What other libraries call them; messages name the others.
_OF_OTHERS = (("prompt", "completion"), ("instruction", "output"), ("data",), ("conversatons",))

# Keys that a row may have besides, by the first key of its content: the rest of the prompt in Alpaca's form; the prompt
# once more in UltraChat's.
_TURNS = frozenset({"system", "tools"})
_PICTURES = frozenset({"image", "images"})
_BESIDE = {"text": frozenset[str](), "instruction": _TURNS | {"input"}, "messages": _TURNS | {"prompt"}}

# Keys beside which a text is not taken for the content of a row; others may be about it.
_USUAL = frozenset({"prompt", "response", "input", "target", "messages", "conversations"})

# Keys that say where a pair or a conversation comes from, and nothing that is to be learnt.
_ABOUT = frozenset(
    "id ids idx index uuid hash row_id example_id prompt_id question_id conversation_id conversation_hash dialogue_id "
    "source sources dataset dataset_name data_source origin url license category categories topic topics task "
    "task_name task_type subset split tag tags lang language model model_name generator created created_at "
    "created_timestamp timestamp date meta metadata num_turns turn turns num_tokens length score quality rating "
    "difficulty kind kinds answer_type question_type width height".split()
)

# Names of roles in conversations of ShareGPT and of data sets in its format.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_ROLES |= {"observation": "tool", "function_response": "tool", "tool_response": "tool"}
_CALL = "function_call"
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
      pictures: in the order in which they stand in the text, which has a mark for each.
    """

    text: str
    prompt_chars: int = 0
    begins: bool = True
    ends: bool = True
    is_response: bool = False
    spans: tuple[tuple[int, int], ...] | None = None
    pictures: tuple[PictureSource, ...] = ()

    def at(self, where: str, folder: Path) -> "Example":
        """Returns the example with the place of its row: its pictures say it in messages, and lie near it."""
        if not self.pictures:
            return self
        placed = (picture._replace(where=where, beside=folder) for picture in self.pictures)
        return self._replace(pictures=tuple(placed))


class RowReader:
    """Makes examples from rows.

    Args:
      fields: the keys that hold the content, beside which a row may have any others; None: known by their names.
      template: returns the template that conversations are written with; called when the first conversation comes.
      chat: pairs are written with the template as well, as a conversation of two turns.
      kinds: the kinds of rows that are accepted.
      sees: whether the model takes pictures, which rows then may name or hold.
    """

    def __init__(
        self,
        fields: FieldsSection | None = None,
        *,
        template: Callable[[], ChatTemplate] | None = None,
        chat: bool = False,
        kinds: Sequence[str] = ("text", "pair", "chat"),
        sees: bool = False,
    ):
        self._template = template
        self._sees, self._image = sees, None if fields is None else fields.image
        self._chat = chat
        self._role_keys = _ROLE_KEYS
        by_kind = {"text": (("text",),), "pair": PAIR_KEYS, "chat": tuple((key,) for key in CHAT_KEYS)}
        self._system, self._tools = "system", "tools"
        if fields is not None:
            by_kind = {kind: (keys,) if keys else () for kind, keys in fields.keys_by_kind().items()}
            self._role_keys = ((fields.role, fields.content),)
            self._system, self._tools = fields.system, fields.tools
        self._kind_of = {keys: kind for kind in kinds for keys in by_kind[kind]}
        self._is_told = fields is not None
        self._takes_chats = "chat" in kinds
        self._known = {"text", *itertools.chain(*PAIR_KEYS), *CHAT_KEYS}

    def columns(self, names: Sequence[str]) -> list[str]:
        """Returns those of a table's columns that are read: all that may matter, as none can be looked at before."""
        if self._is_told:
            wanted = {*itertools.chain(*self._kind_of), self._system, self._tools, self._image}
            found = [name for name in names if name in wanted]
        elif ("text",) in self._kind_of and "text" in names and not _USUAL & {*names}:
            found = [name for name in names if name == "text" or (self._sees and name in _PICTURES)]
        else:
            found = [name for name in names if name not in _ABOUT]
        return found if any(set(keys) <= set(found) for keys in self._kind_of) else []

    @property
    def expected(self) -> str:
        """The usual rows that are accepted, in words."""
        return " or ".join(self._shape(keys) for keys in self._kind_of if keys not in _OF_OTHERS)

    def _shape(self, keys: tuple[str, ...]) -> str:
        value = "[...]" if self._kind_of[keys] == "chat" else '"..."'
        return "{" + ", ".join(f'"{clipped(key)}": {value}' for key in keys) + "}"

    def __call__(self, row: Any) -> list[Example]:
        """Returns the examples of a row: one, or for a conversation as many as `ChatTemplate.scored` returns.

        Raises:
          InputError: if the row holds something else.
        """
        if not isinstance(row, Mapping):
            raise InputError(f"expected {self.expected}, got a JSON {type(row).__name__}")
        keys = self._keys_of(row)
        kind = self._kind_of[keys]
        if kind == "text":
            text = self._text(row, keys, 0)
            return [Example(text, pictures=self._beside_text(row, text))]
        if kind == "chat":
            messages = self._messages(row, keys, 0)
            if not self._is_told and row.get("prompt") is not None:
                _check_first(row["prompt"], messages)
            return self._conversation(row, messages)
        if self._takes_chats and all(_is_messages(row[key], key) for key in keys):  # TRL's conversational form
            prompt, answer = (self._messages(row, keys, number) for number in (0, 1))
            if not any(message["role"] == "assistant" for message in answer):
                raise InputError(f'{shown(keys[1])} has no message of the "assistant"')
            return self._conversation(row, [{**message, "train": False} for message in prompt] + answer)
        prompt, response = (self._text(row, keys, number) for number in (0, 1))
        is_alpaca = keys[0] == "instruction" and not self._is_told
        if is_alpaca and row.get("input"):
            prompt = f"{prompt}\n{self._text(row, (*keys, 'input'), 2)}"
        if self._chat:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            return self._conversation(row, turns)
        if is_alpaca and self._takes_chats:  # others have what is to stand between; an encoder has its own input
            prompt += "\n"
        for name in (self._system, self._tools):
            if name is not None and _from_json(row.get(name), name):
                more = ": set chat = true in its source" if self._takes_chats else ", and this is a pair"
                raise InputError(f"{shown(name)} beside {shown(keys[0])} goes into a conversation{more}")
        if MARK in response and self._pictures(row):
            raise InputError(f"{shown(keys[1])} shows a picture ({MARK}); a prompt does")
        pictures = self._beside_text(row, prompt, marks_count=self._sees)
        return [Example(prompt + response, len(prompt), is_response=True, pictures=pictures)]

    def _pictures(self, row: Mapping[str, Any]) -> list[PictureSource]:
        """Returns the pictures beside the content of a row."""
        if not self._sees or (self._is_told and self._image is None):
            return []
        return pictures_of_row(row, self._image)

    def _beside_text(
        self, row: Mapping[str, Any], text: str, *, marks_count: bool = False
    ) -> tuple[PictureSource, ...]:
        """Returns the pictures of a text, which has a mark for each; of one without pictures only if `marks_count`."""
        pictures = self._pictures(row)
        if pictures or marks_count:
            check_places(len(pictures), text.count(MARK), f"its text ({MARK})", self._unnamed())
        return tuple(pictures)

    def _unnamed(self) -> str:
        """Returns what to do where no key of pictures is named."""
        return "; fields.image names the key of pictures" if self._is_told and self._image is None else ""

    def _keys_of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the keys that hold the content of a row; raises `InputError` for others that may matter."""
        if self._is_told:
            found = next((keys for keys in self._kind_of if set(keys) <= row.keys()), None)
            unused: set[str] = set()
        else:
            given = {key for key, value in row.items() if value is not None}
            # Of rows with keys of several kinds, none is taken for the other.
            fits = (keys for keys in self._kind_of if set(keys) <= given)
            found = next((keys for keys in fits if self._others(row, keys) <= _beside(row, keys)), None)
            is_text = found is not None and self._kind_of[found] == "text"  # which is whole without what is beside it
            filled = {key for key in given if row[key] not in ("", [], {})}
            unused = set() if found is None or is_text else filled - {*found} - _beside(row, found) - _ABOUT
            unused -= _PICTURES if self._sees else set()
        if found is None:
            names = clipped(", ".join(map(shown, row))) or "(none)"
            told = "" if self._is_told or not row else "; a source's fields = { ... } says which keys hold what"
            raise InputError(f"expected {self.expected}, got an object with the keys {names}{told}")
        if unused & _PICTURES:
            raise InputError(
                f"{shown(min(unused & _PICTURES))} holds a picture, and the model takes none: it has no eye"
            )
        if unused:
            names = clipped(", ".join(map(shown, sorted(unused))))
            beside = " and ".join(map(shown, found))
            raise InputError(
                f"{names} beside {beside} would be left out; a source's fields = {{ ... }} says which keys are read "
                "(system and tools too), and that others are not"
            )
        return found

    def _others(self, row: Mapping[str, Any], keys: tuple[str, ...]) -> set[str]:
        """Returns the keys of a row that hold the content of other kinds than these keys."""
        known = {"text", *_USUAL} if keys == ("text",) else self._known
        return {key for key in known - {*keys} if row.get(key) is not None and _holds(row[key], key)}

    def _text(self, row: Mapping[str, Any], keys: tuple[str, ...], number: int) -> str:
        """Returns the text under one of the keys of a row."""
        value = row[keys[number]]
        if not isinstance(value, str):
            got = f"a {type(value).__name__} that should be a string"
        elif not is_unicode(value):
            got = "one half of a character in UTF-16"
        else:
            return value
        raise InputError(f"expected {self._shape(keys[:2])}, got {shown(keys[number])} holding {got}")

    def _messages(self, row: Mapping[str, Any], keys: tuple[str, ...], number: int) -> list[dict[str, Any]]:
        """Returns the messages under one of the keys of a row, in the form that chat templates take."""
        messages = _from_json(row[keys[number]], keys[number])
        if not isinstance(messages, list) or not messages:
            got = f"{shown(keys[number])} holding {shown(messages)} that should be a list of messages"
            raise InputError(f"expected {self._shape(keys)}, got {got}")
        if all(isinstance(one, str) for one in messages) and len(messages) > 1:  # UltraChat: turn and turn about
            return [{"role": ("user", "assistant")[i % 2], "content": one} for i, one in enumerate(messages)]
        return [self._message(one, number) for number, one in enumerate(messages, start=1)]

    def _conversation(self, row: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[Example]:
        """Writes a conversation; beside its messages a row may have a system prompt and tools."""
        if self._template is None:
            raise InputError("a conversation needs a tokenizer with a chat template")
        system = row.get(self._system) if self._system else None
        if system:
            own = messages[0].get("content") if messages[0]["role"] == "system" else None
            messages = messages[1:] if own == "" else messages
            own = own or None
            if not isinstance(system, str) or own not in (None, system):
                raise InputError(f"{shown(self._system)} is {shown(system)}, expected the text of a first message")
            messages = messages if own else [{"role": "system", "content": system}, *messages]
        tools: Any = _from_json(row.get(self._tools), self._tools) if self._tools else None
        tools = [tools] if isinstance(tools, Mapping) and tools else tools or None
        if tools is not None and not isinstance(tools, list):
            raise InputError(f"{shown(self._tools)} is {shown(tools)}, expected a list of tools")
        pictures, template = self._pictures(row), self._template()
        shows = bool(pictures) or (self._sees and has_pictures(messages))
        if self._sees and not template.takes_parts:
            shows = shows or any(isinstance(message.get("content"), list) for message in messages)
        if shows:
            how = {"as_parts": template.takes_parts, "told": self._unnamed()}
            messages, pictures = with_pictures(messages, pictures, **how)
        learnt = [bool(message.pop("train", True)) for message in messages]
        of_assistant = [learn for learn, one in zip(learnt, messages, strict=True) if one["role"] == "assistant"]
        if of_assistant and not any(of_assistant):
            return []  # as it asks
        scored = template.scored(messages, learnt=learnt, tools=tools, pictures=shows)
        if len(scored) > 1 and pictures:
            raise InputError("the chat template writes past turns in another way, which is not known with pictures")
        return [Example(one.text, spans=one.spans, pictures=tuple(pictures)) for one in scored]

    def _message(self, message: Any, number: int) -> dict[str, Any]:
        """Converts a message to the form that chat templates take; null values, as tables have them, are left out.

        Under `train` it is false if the message is not to be learnt.
        """
        if not isinstance(message, Mapping):
            raise InputError(f"message {number} is {shown(message)}, expected an object")
        names = next((names for names in self._role_keys if names[0] in message), None)
        if names is None:
            wanted = " or ".join(shown(role) for role, _ in self._role_keys)
            raise InputError(f"message {number} has no {wanted}, but {clipped(', '.join(map(shown, message)))}")
        role, content = (message.get(name) for name in names)
        others = {key: item for key, item in message.items() if key not in names and item is not None}
        for name in ("weight", "train"):
            weight = others.pop(name, 1)
            if weight not in (0, 1):
                raise InputError(f"message {number} has the {name} {shown(weight)}, expected 0 or 1, or false or true")
            if not weight:
                others["train"] = False
        if role == _CALL:
            return {"role": "assistant", "content": "", "tool_calls": _calls(content, number), **others}
        known = _ROLES.get(role, role) if isinstance(role, str) else role
        return {"role": known, "content": content, **others}


def _beside(row: Mapping[str, Any], keys: tuple[str, ...]) -> set[str]:
    """Returns the keys that a row may have beside those of its content."""
    allowed = set(_BESIDE.get(keys[0], _TURNS))
    # The data set of Alpaca has both in one text, too.
    if keys[0] == "instruction" and isinstance(text := row.get("text"), str) and text.endswith(str(row[keys[1]])):
        allowed.add("text")
    return allowed


def _holds(value: Any, key: str) -> bool:
    """Whether a value can be the content under a key: `data` is a list of turns, or nothing of the kind."""
    return key != "data" or isinstance(value, list)


def _is_messages(value: Any, key: str) -> bool:
    """Whether a value is a list of messages, or the text of one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = _from_json(value, key)
        except InputError:
            return False
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _check_first(prompt: Any, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises `InputError` if a prompt beside a conversation is not what the user says first in it."""
    first = next((message["content"] for message in messages if message["role"] == "user"), None)
    if isinstance(first, list) and all(isinstance(part, Mapping) for part in first):
        first = "".join(str(part.get("text", "")) for part in first)
    if not isinstance(prompt, str) or not isinstance(first, str) or first.strip() != prompt.strip():
        raise InputError(f"'prompt' is {shown(prompt)}, but the user's first message is {shown(first)}")


def _from_json(value: Any, key: str | None) -> Any:
    """Returns a value, parsed if it is the text of a list or an object, as tables have it whose rows must be alike."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        return parse_json(value.encode("utf-8", "replace"), where=f"{shown(key)}, which", allow=ANYTHING)
    return value


def _calls(content: Any, number: int) -> list[dict[str, Any]]:
    """Returns the tool calls of ShareGPT's `function_call`: an object with name and arguments, or several, as JSON."""
    where = f"the function_call in message {number}"
    if isinstance(content, str):
        content = parse_json(content.encode("utf-8", "replace"), where=where, allow=ANYTHING)
    calls = content if isinstance(content, list) else [content]
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise InputError(f'{where} is {shown(content)}, expected {{"name": "...", "arguments": {{...}}}}')
    return [{"type": "function", "function": {"arguments": {}, **call}} for call in calls]
