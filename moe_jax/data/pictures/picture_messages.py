"""Pictures in conversations: which message shows which, in the form that a chat template takes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from moe_jax.core.errors import InputError, shown
from moe_jax.data.chat_template import PICTURE_PARTS, ChatTemplate, check_messages
from moe_jax.data.pictures.picture_sources import (
    ANY_PICTURE,
    MARK,
    MARKS_OF_OTHERS,
    PictureSource,
    check_places,
    picture_of,
)

T = TypeVar("T")

# Keys of such a part that may name or hold the picture.
_OF_PART = ("image", "image_url", "url", "path", "base64", "data", "bytes")


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message has a mark for a picture, or a part that is one."""
    return places_of(messages) > 0


def places_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of marks for pictures in messages, and of parts that are pictures."""
    return sum(_marks(message.get("content")) for message in messages if isinstance(message, Mapping))


class Taken(NamedTuple):
    """Messages whose parts that are pictures say no more than that they are, and the pictures, in order."""

    messages: Any
    pictures: tuple[Any, ...]


def taken_pictures(messages: Any, read: Callable[[Any, str], T]) -> Taken:
    """Takes the pictures out of messages; what is wrong with messages otherwise stays as it is, for `check_messages`.

    Args:
      messages: as somebody gave them.
      read: returns the picture that a value names or holds, such as `picture_of`; given the value and where it stands.

    Raises:
      InputError: for a part that holds no picture; and what `read` raises.
    """
    pictures = []

    def take(value: Any, where: str) -> dict[str, Any]:
        pictures.append(read(value, where))
        return {"type": "image"}

    return Taken(replaced_pictures(messages, take), tuple(pictures))


def replaced_pictures(messages: Any, replace: Callable[[Any, str], dict[str, Any]]) -> Any:
    """Returns messages with other parts in place of those that are pictures; arguments and errors as of
    `taken_pictures`."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return messages
    made = []
    for number, message in enumerate(messages, start=1):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            where = f"the picture in message {number}"
            parts = [replace(_held(part, where), where) if _is_picture(part) else part for part in content]
            message = {**message, "content": parts}
        made.append(message)
    return made


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] in PICTURE_PARTS


def _held(part: Mapping[str, Any], where: str) -> Any:
    value = _value_of(part)
    if value is None:
        raise InputError(f"{where} holds nothing; expected one of {', '.join(_OF_PART)}")
    return value


def _value_of(part: Mapping[str, Any]) -> Any:
    """Returns what names or holds the picture of a part; None: nothing does."""
    return next((part[key] for key in _OF_PART if part.get(key) is not None), None)


def conversation_text(
    messages: Sequence[Mapping[str, Any]],
    pictures: int,
    template: ChatTemplate,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Returns a conversation with pictures, by default up to where its answer begins, as its template writes it.

    Args:
      messages: as `check_messages` takes them; pictures are parts `{"type": "image"}`, or stand at `<image>` in texts.
      pictures: number of them.
      template: of the model.
      add_generation_prompt: whether the text ends with the prompt for the assistant's answer.

    Raises:
      InputError: if pictures and places for them differ in number, an answer shows one, or the template refuses.
    """
    checked, any_pictures = check_messages(messages, pictures=True), [ANY_PICTURE] * pictures
    messages, _ = with_pictures(checked, any_pictures, as_parts=template.takes_parts)
    return template(messages, add_generation_prompt=add_generation_prompt, pictures=True)


def with_pictures(
    messages: Sequence[Mapping[str, Any]], pictures: Sequence[PictureSource], *, as_parts: bool, told: str = ""
) -> tuple[list[dict[str, Any]], tuple[PictureSource, ...]]:
    """Returns messages as a template takes them, and their pictures in the order in which they are shown.

    A text shows a picture at each `<image>`, and parts show those that are of a picture's type: their own, or else the
    next of the row's.

    Args:
      messages: with `role` and `content`, a text or a list of parts.
      pictures: of the row, beside its messages.
      as_parts: whether all contents become lists of parts, where a line end next to a mark is the template's; otherwise
        they become texts with marks, behind which parts of text begin a line.
      told: what a message says besides where pictures and marks differ in number.

    Raises:
      InputError: if pictures and marks differ in number, an answer shows a picture, or a text has a mark of another
        form of data.
    """
    left, taken = list(pictures), []
    made = []
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        if message.get("role") == "assistant" and _marks(content):
            raise InputError(f"message {number} is an answer, and shows a picture ({MARK}); questions do")
        parts = _parts(content, number)
        if parts is None:
            made.append(dict(message))
            continue
        for part in parts:
            if isinstance(part, str):
                other = next((mark for mark in MARKS_OF_OTHERS if mark in part), None)
                if other is not None:
                    raise InputError(f"message {number} has {shown(other)}; pictures stand at {MARK}, and nothing else")
            else:
                taken.append(part or (left.pop(0) if left else None))
        of_text = isinstance(content, str)
        made.append({**message, "content": _as_parts(parts, of_text) if as_parts else _as_text(parts, of_text)})
    if left or None in taken:
        marks = sum(part is None or part in pictures for part in taken)
        check_places(len(pictures), marks, f"the conversation ({MARK})", told)
    return made, tuple(one for one in taken if one is not None)


def _marks(content: Any) -> int:
    if isinstance(content, str):
        return content.count(MARK)
    if not isinstance(content, list):
        return 0
    return sum(map(_is_picture, content))


def _parts(content: Any, number: int) -> Sequence[str | PictureSource | None] | None:
    """Returns the texts and pictures of a content in turn, None for the next picture of the row; None: no texts."""
    if isinstance(content, str):
        texts = content.split(MARK)
        return [part for text in texts for part in (None, text)][1:]
    if not isinstance(content, list):
        return None
    found: list[str | PictureSource | None] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if _is_picture(part):
            value = _value_of(part)
            found.append(None if value is None else picture_of(value, f"the picture in message {number}"))
        elif isinstance(part, Mapping) and kind in ("text", "input_text") and isinstance(part.get("text"), str):
            if MARK in part["text"]:
                raise InputError(f"message {number} has {MARK} in a part that is text; give the picture as a part")
            found.append(part["text"])
        else:
            raise InputError(f"message {number} has the part {shown(part)}, expected a text or a picture")
    return found


def _as_text(parts: Sequence[str | PictureSource | None], of_text: bool) -> str:
    if of_text:
        return "".join(part if isinstance(part, str) else MARK for part in parts)
    written = ""
    for index, part in enumerate(parts):
        if not isinstance(part, str):
            written += MARK
        elif index and (isinstance(parts[index - 1], str) or not part.startswith("\n")):
            # A text is a line of its own, as it is in messages without pictures.
            written += f"\n{part}"
        else:
            written += part
    return written


def _as_parts(parts: Sequence[str | PictureSource | None], of_text: bool) -> list[dict[str, str]]:
    made = []
    for index, part in enumerate(parts):
        if not isinstance(part, str):
            made.append({"type": "image"})
            continue
        if of_text and index:
            part = part.removeprefix("\n")
        elif of_text and len(parts) > 1:
            part = part.removesuffix("\n")
        if part or not of_text:
            made.append({"type": "text", "text": part})
    return made or [{"type": "text", "text": ""}]
