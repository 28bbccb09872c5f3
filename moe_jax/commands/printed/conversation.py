"""A conversation with a model, line by line: `moe-jax generate MODEL --chat`."""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from moe_jax.core.errors import shown
from moe_jax.data.chat_template import Message, load_chat_template

if TYPE_CHECKING:
    from moe_jax.api.generate import Continuation, Speed, Wanted
    from moe_jax.api.model import Model


def notes_on_length(model: "Model", results: Sequence["Continuation"], wanted: "Wanted") -> list[str]:
    """Returns a note if texts may become longer than those that the model was trained for."""
    longest, added = max(len(result.prompt_ids) for result in results), wanted.max_new_tokens
    longest, most = max(longest, added) if model.config.has_encoder else longest + added, model.config.max_positions
    return [f"note: {longest} positions, but the model was trained for {most}"] if longest > most else []


def endings(results: Sequence["Continuation"]) -> list[str]:
    """Returns a line for each reason why texts ended, with the numbers of the prompts if there are several."""
    rows: dict[str, list[int]] = {}
    for index, result in enumerate(results):
        rows.setdefault(_ending(result), []).append(index + 1)
    if len(results) == 1:
        return [f"ended {why}" for why in rows]
    return [f"{_numbers(numbers)} ended {why}" for why, numbers in rows.items()]


def show_speed(speed: "Speed") -> str:
    """Returns tokens, seconds and tokens per second in one line."""
    if speed.tokens == 1:
        return f"1 token in {speed.seconds:.1f} s"
    rate = f"the first after {speed.first:.1f} s, then {speed.per_second:.1f} a second"
    return f"{speed.tokens} tokens in {speed.seconds:.1f} s: {rate}"


def _ending(result: "Continuation") -> str:
    if result.reason == "length":
        return f"at {len(result.ids)} tokens (--max-new-tokens)"
    what = {"eos": "EOS", "stop_id": "--stop-ids", "stop": "--stop"}[result.reason]
    by = shown(result.ended_by) if result.reason == "stop" else result.ended_by
    return f"with {by} ({what})" if result.ids else f"at once with {by} ({what}): nothing was added"


def _numbers(numbers: Sequence[int]) -> str:
    """Returns numbers as text with ranges, such as `prompts 1-3, 7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    joined = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"prompt{'s' if len(numbers) > 1 else ''} {joined}"


_HELP = "/clear forgets what was said, /exit ends; Ctrl-C ends an answer"


def converse(model: "Model", system: Sequence[Message], wanted: "Wanted") -> None:
    """Answers the lines of standard input one after the other, until the input ends or a line is /exit.

    For every answer the whole conversation is read anew, because a template may write earlier messages in another way.
    Answers are printed as they come; Ctrl-C ends one, and its text so far stays in the conversation.

    Args:
      model: a model with a tokenizer that has a chat template.
      system: messages before the first line.
      wanted: the options of `generate`.

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
