"""The process in which templates of strangers are rendered, with little memory and little time. Run as a program.

It is what `template_sandbox` starts and asks; it imports nothing of this library, and writes no file. Its answers are
JSON and not pickles: whatever a template did in here, the process that asked reads plain values.
"""

import datetime
import functools
import json
import pickle
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

MAX_MEMORY = 1 << 28
"""Bytes of address space, Python's own included."""

_written = [0]
_generations: list[tuple[int, str]] = []


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: writes its body, and notes where, as Transformers does."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        body = caller()
        _generations.append((_written[0], body))
        return body


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(of_task: bool) -> jinja2.Environment:
    """Jinja's sandbox as Transformers sets it up for chat templates, or as lm-eval does for prompts of tasks."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=not of_task,
        lstrip_blocks=not of_task,
        keep_trailing_newline=of_task,
        undefined=jinja2.StrictUndefined if of_task else jinja2.Undefined,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    if of_task:
        environment.filters["regex_replace"] = lambda text, pattern, new, count=0: re.sub(
            pattern, new, text, count=count
        )
    environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.datetime.now().strftime(form))
    return environment


@functools.lru_cache(maxsize=256)
def _compiled(source: str, of_task: bool) -> jinja2.Template:
    return _environment(of_task).from_string(source)


def _rendered(template: jinja2.Template, values: Mapping[str, Any], max_chars: int) -> dict[str, Any]:
    pieces: list[str] = []
    _written[0] = 0
    _generations.clear()
    for piece in template.generate(**values):
        pieces.append(piece)
        _written[0] += len(piece)
        if _written[0] > max_chars:
            raise jinja2.TemplateError(f"it writes more than {max_chars:,} characters")
    text = "".join(pieces)
    if any(text[begin : begin + len(body)] != body for begin, body in _generations):
        raise jinja2.TemplateError("{% generation %} stands inside of a macro or a block that is kept")
    spans = [(begin, begin + len(body)) for begin, body in _generations if body]
    return {"text": text, "generations": spans}


def _answer(
    source: str, values: Mapping[str, Any] | None, of_task: bool, max_chars: int, max_seconds: float
) -> dict[str, Any]:
    # Its default action ends the process, wherever it is: in a loop, or inside of one long operation.
    signal.setitimer(signal.ITIMER_PROF, max_seconds)
    try:
        template = _compiled(source, of_task)
        return {} if values is None else _rendered(template, values, max_chars)
    except (MemoryError, RecursionError) as error:
        return {"endless": type(error).__name__}
    except Exception as error:  # a template can do anything that raises
        line = error.lineno if isinstance(error, jinja2.TemplateSyntaxError) else None
        return {"error": str(error)[:1000] or type(error).__name__, "line": line}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Answers requests on standard input, one after another, until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    while True:
        try:
            limits, given = pickle.load(sys.stdin.buffer), pickle.load(sys.stdin.buffer)
            answer = _answer(*given, *limits)
            line = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except EOFError:
            return
        except MemoryError:  # of values; the one who asks then asks another process
            line = json.dumps({"endless": "MemoryError"}).encode()
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
