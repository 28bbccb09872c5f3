"""A conversation with a model, line by line: `moe-jax generate MODEL --chat`."""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from moe_jax.commands.printed.ending_lines import endings, notes_on_length, show_speed
from moe_jax.data.tokens.chat_template import Message, load_chat_template

if TYPE_CHECKING:
    from moe_jax.api.generate import Wanted
    from moe_jax.api.model import Model

_HELP = "/clear forgets what was said, /exit ends; Ctrl-C ends an answer"


def converse(model: "Model", system: Sequence[Message], wanted: "Wanted") -> None:
    """Answers what is said on standard input, a line at a time, until it ends or says /exit.

    Every answer is given all that was said before, read anew: a template may write what lies in the past in another
    way. Answers are printed as they come; Ctrl-C ends one, and what was said of it counts.

    Args:
      model: with a tokenizer that has a chat template.
      system: messages before the first line.
      wanted: how answers are generated.

    Raises:
      InputError: if there is no tokenizer or no chat template, or sampling options are bad.
    """
    from moe_jax.api.generate import continue_prompts, prompt_ids
    from moe_jax.api.run import tokenizer_of

    load_chat_template(tokenizer_of(model, "a conversation", "give prompts as token ids (--ids)").path)
    model.read()
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # lines can be edited and called back
        print(_HELP, file=sys.stderr)
    said: list[Message] = [*system]
    for line in _lines():
        if line in ("/exit", "/quit"):
            return
        if line == "/clear":
            said = [*system]
            continue
        said.append({"role": "user", "content": line})
        pieces: list[str] = []

        def show(row: int, text: str, pieces: list[str] = pieces) -> None:
            pieces.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()

        notes = []
        try:
            (result,), speed = continue_prompts(model, [prompt_ids(said, model)], wanted, show)
            notes = [*endings([result]), show_speed(speed), *notes_on_length(model, [result], wanted)]
        except KeyboardInterrupt as interrupt:
            if type(interrupt) is not KeyboardInterrupt:  # a signal that is not Ctrl-C ends the program
                print(flush=True)
                raise
            notes = ["ended by Ctrl-C"]
        print(flush=True)
        for note in notes:
            print(f"moe-jax: {note}", file=sys.stderr)
        said.append({"role": "assistant", "content": "".join(pieces)})


def _lines() -> Iterator[str]:
    """Yields the lines that the user writes, but for empty ones. On a terminal Ctrl-C drops the line being written."""
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt as interrupt:
            if type(interrupt) is not KeyboardInterrupt or not sys.stdin.isatty():
                raise
            print(f"\n{_HELP}", file=sys.stderr)
            continue
        if not line and not sys.stdin.isatty():
            return
        if line.strip():
            yield line.strip()
