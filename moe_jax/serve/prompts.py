"""Prompts of requests as tokens, and as they are echoed."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from moe_jax.core.errors import InputError, shown
from moe_jax.data.chat_template import ChatTemplate, Message, load_chat_template
from moe_jax.data.pictures.picture_messages import conversation_text
from moe_jax.data.pictures.picture_sources import PictureSource
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.generation.eye import SeenPicture
from moe_jax.generation.texts import Detokenizer
from moe_jax.serve.asked_pictures import PictureReader
from moe_jax.serve.protocol_error import ProtocolError


class Prompt(NamedTuple):
    """A prompt: its tokens, its pictures, and for its echo the text, and where in it each token begins, in characters.

    `slots` are for every token, of a prompt with pictures, which feature of these takes its place, counted from 1.
    """

    ids: list[int]
    text: str = ""
    begins: Sequence[int] = ()
    pictures: Sequence[SeenPicture] = ()
    slots: Sequence[int] = ()


class PromptReader:
    """Makes prompts of what requests hold, in any thread.

    Its errors, `ProtocolError` with status 400, do not say where the server's files are.

    Args:
      tokenizer: the model's.
      vocab_size: of the model.
      context: tokens that a prompt and its answer have together at most.
      sees: reads pictures; None: the model takes none.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, context: int, sees: PictureReader | None = None):
        self._sees = sees
        self._tokenizer, self._vocab_size, self._context = tokenizer, vocab_size, context
        self._most_of_token = tokenizer.most_characters()

    def of(self, given: str | list[int], *, echo: bool = False) -> Prompt:
        """Returns the prompt that a text is, or token ids; with its echo: the text itself, or that of all the ids."""
        if isinstance(given, str):
            ids, begins = self._tokens_of(given, "prompt")
            self._check_reads_only(ids, "prompt")
            bos = [] if self._tokenizer.bos is None else [self._tokenizer.bos]  # it is no part of the text
            if not bos and not ids:
                raise _refused("prompt", "it has no tokens")
            if echo and self._text_of(ids) == given:
                begins = self._begins(ids)  # exact where the library is not: it counts no space at a token's end to it
            return Prompt([*bos, *ids], given, [*[0] * len(bos), *begins]) if echo else Prompt([*bos, *ids])
        if len(given) > self._context:
            raise self._too_long("prompt", f"has {len(given):,} of them")
        if outside := [token for token in given if not 0 <= token < self._vocab_size]:
            raise _refused("prompt", f"token id {shown(outside[0])} lies outside the vocabulary of {self._vocab_size}")
        self._check_reads_only(given, "prompt")
        return Prompt(given, self._text_of(given), self._begins(given)) if echo else Prompt(given)

    def of_conversation(self, messages: Sequence[Message], pictures: Sequence[PictureSource] = ()) -> Prompt:
        """Returns a conversation up to where the answer begins, as the chat template writes it.

        Where it has pictures, their places in the messages are parts `{"type": "image"}`, in order.
        """
        if pictures:
            return self._that_shows(messages, pictures)
        try:
            text = self._template(messages, add_generation_prompt=True)
        except InputError as error:
            raise self._error(error, "messages") from None
        ids = self._tokens_of(text, "messages")[0]
        if not ids:
            raise _refused("messages", "it has no tokens, for the chat template writes none")
        self._check_reads_only(ids, "messages")
        return Prompt(ids)

    def _that_shows(self, messages: Sequence[Message], pictures: Sequence[PictureSource]) -> Prompt:
        assert self._sees is not None, "requests with pictures are for models that see"
        try:
            text = conversation_text(messages, len(pictures), self._template)
            self._check_length(text, "messages")
            row = self._sees.place(self._tokenizer.encode(text, pictures=True).tolist(), len(pictures))
        except InputError as error:
            raise self._error(error, "messages") from None
        if len(row.ids) >= self._context:  # before anything is decoded
            raise self._too_long("messages", f"has {len(row.ids):,}")
        return Prompt(row.ids, pictures=[self._sees.read(picture) for picture in pictures], slots=row.slots)

    def _check_reads_only(self, ids: Sequence[int], param: str) -> None:
        token = None if self._sees is None else self._sees.placeholder
        if token is not None and token in ids:
            raise _refused(
                param, f"token {token} stands for a picture; pictures are parts of a conversation's messages"
            )

    def _tokens_of(self, text: str, param: str) -> tuple[list[int], list[int]]:
        """The tokens of a text that is not too long to have few enough, and where they begin."""
        self._check_length(text, param)
        try:
            return self._tokenizer.placed(text)
        except InputError as error:
            raise self._error(error, param) from None

    def _check_length(self, text: str, param: str) -> None:
        if self._most_of_token is not None and len(text) > self._context * self._most_of_token:
            raise self._too_long(
                param, f"has {len(text):,} characters, of which a token has at most {self._most_of_token}"
            )

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return load_chat_template(self._tokenizer.path)

    def _text_of(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, special=True)

    def _begins(self, ids: Sequence[int]) -> list[int]:
        return list(map(Begins(self._tokenizer, special=True).of, ids))

    def _too_long(self, param: str, size: str) -> ProtocolError:
        problem = f"this model's maximum context length is {self._context} tokens; the prompt {size}"
        return ProtocolError(400, problem, param=param, code="context_length_exceeded")

    def _error(self, error: InputError, param: str) -> ProtocolError:
        folder = str(self._tokenizer.path.parent)
        return _refused(param, str(error).replace(f"{folder}/", "").replace(folder, "the model"))


class Begins:
    """Returns where tokens begin in a text, in characters; those of one character all begin where it does.

    The text, which has `chars` characters so far, goes on after the tokens `before`.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), chars: int = 0, *, special: bool = False):
        self._tokenizer, self._chars = tokenizer, chars
        self._text, self._broken = Detokenizer(functools.partial(tokenizer.decode, special=special), before), False

    def of(self, token: int) -> int:
        """Returns where the next token begins."""
        begin = self._chars
        if self._broken and not _goes_on(self._tokenizer.bytes_of(token)):
            begin += len(self._text.finish())  # what came before will never be a character
        new = self._text.push(token)
        self._chars, self._broken = self._chars + len(new), not new
        return begin


def _goes_on(content: bytes) -> bool:
    """Whether bytes begin within a character of UTF-8."""
    return bool(content) and content[0] & 0xC0 == 0x80


def _refused(param: str, problem: str) -> ProtocolError:
    return ProtocolError(400, f"the prompt cannot be continued: {problem}", param=param)
