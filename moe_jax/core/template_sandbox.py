"""Jinja templates of strangers: nothing of Python can be reached, and rendering ends, in bounded memory.

What is rendered is what Transformers renders of chat templates: blocks are trimmed, loops have `break` and `continue`,
and there are `raise_exception`, `strftime_now`, `{% generation %}`, and a `tojson` that escapes neither HTML nor other
alphabets. Prompts in task files are rendered as lm-eval does.

Jinja's own sandbox (`ImmutableSandboxedEnvironment`) keeps templates from Python's internals. It bounds neither time
nor memory, and no hook of it could bound both: one multiplication, one `replace` or one regular expression may take
hours, or all memory. So templates are rendered in a process of their own (`template_process`), which has few seconds
and little memory. It starts when the first template is compiled, and serves all.
"""

import atexit
import contextlib
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_TEMPLATE = 1 << 18
"""Characters of a template; those in use have a few thousand."""
MAX_CHARS = 1 << 22
"""Characters that a template writes."""
MAX_SECONDS = 0.6
"""Seconds of processor time that rendering a template takes, and three times what compiling does, so that both together
take less than one second, besides what the bytes of values add; those in use take milliseconds."""
_BYTES_PER_SECOND = 16 << 20  # of a template and its values, which add to the seconds
_MAX_REQUEST = 4 * MAX_CHARS + 4 * MAX_TEMPLATE + (1 << 20)  # bytes of a template and its values

_PROGRAM = pathlib.Path(__file__).with_name("template_process.py")
_lock = threading.Lock()
_processes: dict[int, subprocess.Popen[bytes]] = {}


class TemplateFails(Exception):
    """A template is none, refuses its values, or does not end within its bounds.

    Attributes:
      line: of the template, if its syntax is wrong.
      is_endless: whether it took too much time or memory.
    """

    def __init__(self, message: str, *, line: int | None = None, is_endless: bool = False):
        super().__init__(message)
        self.line, self.is_endless = line, is_endless


class Written(NamedTuple):
    """The text that a template makes, and begin and end, in characters, of what its `{% generation %}` blocks wrote."""

    text: str
    generations: tuple[tuple[int, int], ...]


class Template:
    """A template, compiled.

    Args:
      source: its text.
      of_task: whether it is a prompt of a task file: nothing is trimmed, an undefined name is an error, and there is
        `regex_replace`.

    Raises:
      TemplateFails: if it is no template, or too long.
    """

    def __init__(self, source: str, *, of_task: bool = False):
        if len(source) > MAX_TEMPLATE:
            raise TemplateFails(f"it has more than {MAX_TEMPLATE:,} characters")
        self._source, self._of_task = source, of_task
        _ask(source, of_task, None)

    def render(self, values: Mapping[str, Any]) -> Written:
        """Returns what the template makes of values, which must be plain ones, as JSON has them.

        Raises:
          TemplateFails: if anything is wrong in the template, or it takes or writes more than the bounds allow.
        """
        answer = _ask(self._source, self._of_task, dict(values))
        return Written(answer["text"], tuple((begin, end) for begin, end in answer["generations"]))


def _ask(source: str, of_task: bool, values: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the answer of the process of templates, which starts if there is none."""
    given = _pickled((source, values))
    seconds = MAX_SECONDS / (3 if values is None else 1) + len(given) / _BYTES_PER_SECOND
    with _lock:
        process = _running()
        assert process.stdin and process.stdout
        try:
            process.stdin.write(pickle.dumps((of_task, MAX_CHARS, seconds)))
            process.stdin.write(given)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        except BaseException:  # such as Ctrl-C: the answer that is still to come is nobody's
            _stop()
            raise
        if not line.endswith(b"\n"):
            _stop()
    if not line.endswith(b"\n"):
        ended = f"its process ended ({process.returncode})"
        why = f"it takes more than {seconds:.2g} seconds" if process.returncode == -signal.SIGPROF else ended
        raise TemplateFails(why, is_endless=True)
    answer = json.loads(line)
    if "endless" in answer:
        with _lock:  # what fills its memory may stay there
            _stop()
        raise TemplateFails(answer["endless"], is_endless=True)
    if "error" in answer:
        raise TemplateFails(answer["error"], line=answer["line"])
    return answer


def _pickled(given: Any) -> bytes:
    """Returns what the process of templates is to read; raises `TemplateFails` if it would be too much."""
    pieces = _Pieces()
    try:
        pickle.Pickler(pieces).dump(given)
    except RecursionError:
        raise TemplateFails("its values are nested too deeply") from None
    return b"".join(pieces.written)


class _Pieces:
    """A file in memory that takes so much and no more."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self._left = _MAX_REQUEST

    def write(self, piece: bytes) -> int:
        self._left -= len(piece)
        if self._left < 0:
            raise TemplateFails(f"its values take more than {_MAX_REQUEST:,} bytes")
        self.written.append(bytes(piece))
        return len(piece)


def _running() -> subprocess.Popen[bytes]:
    # A process that was forked has one of its own.
    process = _processes.get(os.getpid())
    if process is None or process.poll() is not None:
        # Ctrl-C on a terminal is for the process that asks; the other ends when its input does.
        process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _processes[os.getpid()] = process
    return process


@atexit.register
def _stop() -> None:
    process = _processes.pop(os.getpid(), None)
    if process is not None:
        assert process.stdin and process.stdout
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
