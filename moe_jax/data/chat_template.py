"""Writes conversations as the text that a model was trained on, with the chat template of its tokenizer.

A conversation is a list of messages, `{"role": "user", "content": "..."}`. The template is a Jinja program that comes
with the tokenizer: chat_template.jinja, or `chat_template` of tokenizer_config.json (where a GGUF file's template is
put, too). It is rendered as Transformers does, in a sandbox and within bounds (`template_sandbox`).
"""

import contextlib
import functools
import itertools
import json
import os.path
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.core.errors import InputError, first_sentence, nearest, shown
from moe_jax.core.template_sandbox import MAX_CHARS, MAX_TEMPLATE, Template, TemplateFails, Written
from moe_jax.files.json_toml import ANYTHING, is_unicode, parse_json, read_json_object
from moe_jax.files.regular_files import read_regular
from moe_jax.files.storage_path import as_path

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages. A template may know fewer."""

MAX_VALUES = 1 << 16
"""Values of a conversation, and keys: a message of a text has five."""

FILE = "chat_template.jinja"
SHIPPED = Path(__file__).parent / "chat_templates"
"""The folder of the templates that come with the library: `llava-v1` and `llava-plain`."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Scored(NamedTuple):
    """A conversation, or its beginning, as text, and the parts of it that are learnt.

    Attributes:
      text: with its special tokens written out. BOS is there if the template writes it.
      spans: begin and end, in characters, of the assistant's turns: from after the prompt for the turn to the end of
        the token that ends it.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """Writes conversations as text.

    Attributes:
      special_tokens: see below.

    Args:
      source: the template's text; `InputError` is raised if it is no template.
      special_tokens: the tokens that it may name: `bos_token` and others.
      where: where the template comes from; named in errors.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, Any] | None = None, where: str = "the chat template"
    ):
        self.source, self._where, self.special_tokens = source, where, dict(special_tokens or {})
        self._tried: dict[tuple[str, bool], int] = {}
        try:
            self._template = Template(source)
        except TemplateFails as error:
            line = "" if error.line is None else f" (line {error.line})"
            what = "does not end" if error.is_endless else f"is not a chat template{line}"
            raise InputError(f"{where} {what}: {first_sentence(error)}") from None

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
        pictures: bool = False,
    ) -> str:
        """Returns the text of a conversation.

        Args:
          messages: objects with `role` and `content`, a text or parts of one; a message with `tool_calls` needs no
            content. Their other keys are passed to the template as well.
          add_generation_prompt: whether the text ends with the prompt for the assistant's answer.
          tools: what the assistant may call, as the template writes it.
          pictures: whether contents may have parts that are pictures.

        Raises:
          InputError: for anything but messages, a conversation that the template refuses, or tools that it never
            writes.
        """
        return self._render(
            check_messages(messages, pictures=pictures), self._checked_tools(tools), add_generation_prompt
        ).text

    def scored(
        self,
        messages: Sequence[Message],
        *,
        learnt: Sequence[bool] | None = None,
        tools: Sequence[Any] | None = None,
        pictures: bool = False,
    ) -> list[Scored]:
        """Returns the documents that a conversation is learnt from, with the assistant's parts of them.

        If the template marks the generated text (`{% generation %}`), that is learnt. Otherwise a turn is what comes
        after the messages before it and the prompt for an answer; white space after the token that ends a turn is not
        part of it. Both return one document.

        A template may write a past turn in another way, for example without its reasoning. The whole conversation then
        holds turns as no model would be asked to write them, so each turn of the assistant is learnt from a document of
        its own, which ends with it.

        Args:
          messages, tools: see `__call__`.
          learnt: whether each message is learnt if it is the assistant's; None: all are.
          pictures: whether contents may have parts that are pictures.

        Raises:
          InputError: see `__call__`; also if no message is the assistant's, or the beginning of a turn cannot be found.
        """
        messages = check_messages(messages, pictures=pictures)
        learnt = [True] * len(messages) if learnt is None else learnt
        of_assistant = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        turns = [index for index in of_assistant if learnt[index]]
        if not turns:
            raise InputError('a conversation without "assistant" has nothing to learn')
        tools = self._checked_tools(tools)
        whole = self._render(messages, tools, False)
        if whole.generations and len(turns) == len(of_assistant):
            return [Scored(whole.text, whole.generations)]
        if whole.generations and len(whole.generations) == len(of_assistant):
            spans = zip(of_assistant, whole.generations, strict=True)
            return [Scored(whole.text, tuple(span for index, span in spans if learnt[index]))]
        found = [self._turn(messages, tools, index) for index in turns]
        if all(whole.text.startswith(turn.text) for turn in found):
            return [Scored(whole.text, tuple(span for turn in found for span in turn.spans))]
        return found

    def _turn(self, messages: list[dict[str, Any]], tools: list[Any] | None, index: int) -> Scored:
        """Returns the conversation up to and with the assistant's message at `index`; only this message is learnt."""
        before = self._render(messages[:index], tools, True).text
        text = self._render(messages[: index + 1], tools, False).text
        if not text.startswith(before) or len(text) == len(before):
            raise InputError(
                f"{self._where} does not say where message {index + 1} begins: after the prompt for it, "
                f"{shown(before[-30:])}, it writes {shown(text[len(os.path.commonprefix([before, text])) :][:30])}"
            )
        said, content = text[len(before) :], messages[index].get("content")
        if not isinstance(content, str) or said.strip() != content.strip():
            said = said.rstrip()  # a token ends the turn, and white space behind it only separates
        return Scored(text, ((len(before), len(before) + len(said)),))

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Whether contents are lists of parts, of texts and pictures, and not only texts. Found by writing one."""
        parts = [{"type": "image"}, _text_part(_NAME)]
        with contextlib.suppress(TemplateFails):
            text = self._rendered([{"role": "user", "content": parts}], None, True).text
            return _NAME in text and not _holds_parts(text)
        return False

    def _content_of(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of a message, if any, in the form that the template takes: a text, or parts of one.

        Data and clients have either, and a template that knows one form alone leaves the other out, or writes it as
        Python does.
        """
        role, content = message["role"], message.get("content")
        if isinstance(content, str):
            if self._how_well(role, parts=True) > self._how_well(role, parts=False):
                return {"content": [_text_part(content)]}
        elif isinstance(content, list) and all(part["type"] == "text" for part in content):
            if self._how_well(role, parts=False) > self._how_well(role, parts=True):
                return {"content": "\n".join(part["text"] for part in content)}
        return {}

    def _how_well(self, role: str, *, parts: bool) -> int:
        """How a role's text is written, alone or as the only part of a content: 2 well, 1 not at all, 0 with an error
        or as a list of Python's. Found by writing one."""
        if (role, parts) not in self._tried:
            own = {"role": role, "content": [_text_part(_NAME)] if parts else _NAME}
            question = {"role": "user", "content": [_text_part("a")] if parts else "a"}
            messages = {"user": [own], "system": [own, question], "developer": [own, question]}
            self._tried[role, parts] = 0
            with contextlib.suppress(TemplateFails):
                text = self._rendered(messages.get(role, [question, own]), None, role == "user").text
                self._tried[role, parts] = 0 if _holds_parts(text) else 1 + (_NAME in text)
        return self._tried[role, parts]

    def _checked_tools(self, tools: Sequence[Any] | None) -> list[Any] | None:
        """Returns tools as plain values; raises `InputError` if the template, as most, has no place for them."""
        if not tools:
            return None
        if "tools" not in self.source:
            raise InputError(f"{self._where} never writes the tools that a conversation has")
        return _Plain()(list(tools))

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool) -> Written:
        messages = [{**message, **self._content_of(message)} for message in messages]
        if any(message.get("tool_calls") for message in messages):
            messages = [self._with_arguments(message, number) for number, message in enumerate(messages, start=1)]
        try:
            return self._rendered(messages, tools, add_generation_prompt)
        except TemplateFails as error:
            what = "does not end" if error.is_endless else "refuses the messages"
            raise InputError(f"{self._where} {what}: {first_sentence(error)}") from None

    def _rendered(self, messages: list[Any], tools: list[Any] | None, add_generation_prompt: bool) -> Written:
        values = {"messages": messages, "tools": tools, "documents": None}
        return self._template.render({**self.special_tokens, **values, "add_generation_prompt": add_generation_prompt})

    def _with_arguments(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        """Returns a message with the arguments of its tool calls in the form that the template takes.

        Data has them as objects, or as OpenAI does, as the text of one. Most templates write them as JSON themselves,
        and would quote a text once more; others add texts to them, or write an object as Python does.
        """
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            return message
        if self._form_of_arguments == "none":
            raise InputError(f"{self._where} never writes tool calls, which message {number} has")
        return {**message, "tool_calls": [_with_form(call, self._form_of_arguments) for call in calls]}

    @functools.cached_property
    def _form_of_arguments(self) -> str:
        """The form that the template takes: `text`, as Transformers would pass it on, `object`, `any`, or `none`.

        Found by writing a call, which some templates want to be followed by its result.
        """
        found = {form: self._probed(arguments) for form, arguments in (("text", _AS_TEXT), ("object", _PROBE))}
        if all(text is None for text in found.values()):
            return "any"  # it takes other conversations
        if not any(text is not None and (_NAME in text or _KEY in text) for text in found.values()):
            return "none"
        right = {form: text is not None and _KEY in text and not _is_python(text) for form, text in found.items()}
        right["text"] = right["text"] and _AS_TEXT in (found["text"] or "")
        return "any" if right["text"] == right["object"] else "text" if right["text"] else "object"

    def _probed(self, arguments: Any) -> str | None:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        result = {"role": "tool", "content": "b", "name": _NAME, "tool_call_id": "abcdefghi"}
        for messages in (said, [*said, result]):
            with contextlib.suppress(TemplateFails):
                return self._rendered(messages, None, False).text
        return None


# A call that no text has.
_NAME, _KEY = "probed_name", "probed_key"
_PROBE = {_KEY: "c"}
_AS_TEXT = json.dumps(_PROBE)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _holds_parts(text: str) -> bool:
    """Whether parts were written as Python or JSON write them, by a template for texts alone."""
    return any(f"{quote}type{quote}" in text for quote in "'\"")


def _is_python(text: str) -> bool:
    """Whether the probe was written as Python writes it."""
    return f"'{_KEY}'" in text


def _with_form(call: Any, form: str) -> Any:
    """Returns a tool call with its arguments in a form, where they can have it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if form == "text" and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif form == "object" and isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        with contextlib.suppress(InputError):
            arguments = parse_json(arguments.encode("utf-8", "replace"), where="arguments", allow=ANYTHING)
    return {**call, "function": {**function, "arguments": arguments}}


def check_messages(messages: Any, *, pictures: bool = False) -> list[dict[str, Any]]:
    """Returns a conversation as plain lists, objects and scalars; `pictures` may be parts of it, or may not.

    Raises:
      InputError: if it is no list of messages, has a value of the wrong type, more than `MAX_CHARS` characters, or more
        than `MAX_VALUES` values.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InputError(f"expected a list of messages, got {shown(messages)}")
    checked, plain = [], _Plain()
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise InputError(f"message {number} is {shown(message)}, expected an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in ROLES:
            hint = nearest(role, ROLES) if isinstance(role, str) else ""
            raise InputError(f"message {number} has the role {shown(role)}{hint}, known are {', '.join(ROLES)}")
        for text in _texts(content, number, optional=bool(message.get("tool_calls")), pictures=pictures):
            if not is_unicode(text):
                raise InputError(f"message {number} holds one half of a character in UTF-16")
        checked.append(plain(message))
    return checked


PICTURE_PARTS = ("image", "image_url", "input_image")
"""Types of parts of a message that are pictures."""


def _texts(content: Any, number: int, *, optional: bool, pictures: bool) -> list[str]:
    """Returns the texts of a message's content: the content itself, or parts `{"type": "text", "text": "..."}`.

    With `pictures`, parts may also be `{"type": "image"}`.
    """
    if isinstance(content, str):
        return [content]
    if content is None and optional:
        return []
    parts = content if isinstance(content, list | tuple) else [content]
    parts = [part for part in parts if not pictures or part != {"type": "image"}]
    typed = (part for part in parts if isinstance(part, Mapping) and part.get("type") == "text")
    texts = [text for part in typed if isinstance(text := part.get("text"), str)]
    if any(isinstance(part, Mapping) and part.get("type") in PICTURE_PARTS for part in parts):
        raise InputError(f"message {number} holds a picture, and pictures in messages are not supported; give its text")
    if not isinstance(content, list | tuple) or len(texts) < len(parts):
        raise InputError(f"message {number} has the content {shown(content)}, expected a text, or a list of its parts")
    return texts


class _Plain:
    """Returns values as JSON has them, so that a template meets no object with methods of its own.

    Raises:
      InputError: for what JSON cannot hold, and if all that was asked for together is too much.
    """

    def __init__(self) -> None:
        self._values, self._chars = MAX_VALUES, MAX_CHARS

    def __call__(self, value: Any) -> Any:
        self._values -= 1
        if isinstance(value, str):
            self._chars -= len(value)
        if self._values < 0 or self._chars < 0:
            many = f"{MAX_VALUES:,} values" if self._values < 0 else f"{MAX_CHARS:,} characters"
            raise InputError(f"a conversation has more than {many}")
        if value is None or type(value) in (str, int, float, bool):
            return value
        if isinstance(value, Mapping):
            return {self(str(key)): self(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self(item) for item in value]
        raise InputError(f"a message holds {shown(value)}, expected what JSON can hold")


def load_chat_template(tokenizer: Path) -> ChatTemplate:
    """Loads the chat template of a tokenizer; raises `InputError` if it has none, or it is no template."""
    found = find_chat_template(tokenizer)
    if found is None:
        raise InputError(
            f"{tokenizer.parent} has no chat template: neither {FILE} nor chat_template in tokenizer_config.json; a "
            "model that was not trained on conversations has none"
        )
    return found


def read_chat_template(file: Path, tokenizer: Path) -> ChatTemplate:
    """Reads the chat template in a file, with the special tokens of a tokenizer.

    Raises:
      FileNotFoundError: if there is no such file.
      InputError: if it is no template.
    """
    try:
        source = read_regular(file, max_bytes=4 * MAX_TEMPLATE).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text: {error}") from None
    settings = (
        read_settings(tokenizer.with_name(name)) for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    return ChatTemplate(source, special_tokens=special_tokens(*settings), where=str(file))


def template_file(name: str) -> Path:
    """Returns the file of a template that comes with the library, or else the one at a path.

    Raises `FileNotFoundError` for a bare name that is neither.
    """
    if "/" in name:
        return as_path(name)
    shipped, file = SHIPPED / f"{name}.jinja", as_path(name)
    if not shipped.is_file() and not file.exists():
        known = sorted(path.stem for path in SHIPPED.glob("*.jinja"))
        hint = nearest(name, known)
        raise FileNotFoundError(f"no chat template {shown(name)}{hint}; expected a file, or {' or '.join(known)}")
    return as_path(shipped if shipped.is_file() else file)


def find_chat_template(tokenizer: Path) -> ChatTemplate | None:
    """Returns the chat template in the files beside a tokenizer.json; None if there is none.

    chat_template.jinja comes before tokenizer_config.json. Of several named templates, `default` is taken.

    Raises:
      InputError: if there is one that is no template.
    """
    if tokenizer.with_name(FILE).exists():
        return read_chat_template(tokenizer.with_name(FILE), tokenizer)
    file = tokenizer.with_name("tokenizer_config.json")
    settings = read_settings(file)
    source: Any = settings.get("chat_template")
    where = f"chat_template in {file}"
    if isinstance(source, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in source
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        if "default" not in named:
            raise InputError(f'{where} has no template with the name "default", but {shown(list(named))}')
        source = named["default"]
    if source is None:
        return None
    if not isinstance(source, str):
        raise InputError(f"{where} is {shown(source)}, expected a text")
    special = special_tokens(settings, read_settings(tokenizer.with_name("special_tokens_map.json")))
    return ChatTemplate(source, special_tokens=special, where=where)


def read_settings(file: Path) -> dict[str, Any]:
    """Returns the settings in a file beside a tokenizer; none if there is no file."""
    return read_json_object(file, allow=ANYTHING) if file.exists() else {}


def special_tokens(*files: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens by their names in templates; earlier files come before later ones."""
    found = {}
    for name, file in itertools.product(_SPECIAL, files):
        token = file.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            found.setdefault(name, token)
    return found
