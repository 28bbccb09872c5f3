"""Jinja templates of strangers: nothing of Python can be reached, and rendering ends, in bounded memory.

What is rendered is what Transformers renders of chat templates: blocks are trimmed, loops have `break` and `continue`,
and there are `raise_exception`, `strftime_now`, `{% generation %}`, and a `tojson` that escapes neither HTML nor other
alphabets. Jinja's sandbox keeps templates from Python's internals; here steps and sizes are counted besides. Filters
and methods that make texts of any width, which no chat needs, are left out.

Templates of prompts in task files are rendered as lm-eval does, within the same bounds: see `Template`.
"""

import contextvars
import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

MAX_TEMPLATE = 1 << 20
"""Characters of a template."""
MAX_CHARS = 1 << 24
"""Characters that a template writes, and that any text in it has."""
MAX_STEPS = 100_000
"""Passes through loops, and calls of macros."""
_MAX_BITS = 4096
_MAX_INDENT = 64

_WITHOUT_FILTERS = ("batch", "center", "format", "slice", "wordwrap")
_WITHOUT_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
# Widths in a format: so many digits, or taken from the values.
_WIDTH = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*|\{[^{}]*\{")


class TooLarge(jinja2.TemplateError):
    """A template takes too many steps or makes too long a text."""


class Written(NamedTuple):
    """What a template makes.

    Attributes:
      text: all of it.
      generations: begin and end of what `{% generation %}` blocks wrote, in characters.
    """

    text: str
    generations: tuple[tuple[int, int], ...]


class Template:
    """A template, compiled.

    Args:
      source: its text.
      of_task: whether it is a prompt of a task file: nothing is trimmed, an undefined name is an error, and there is
        `regex_replace`.

    Raises:
      jinja2.TemplateError: if it is none, or too long.
    """

    def __init__(self, source: str, *, of_task: bool = False):
        if len(source) > MAX_TEMPLATE:
            raise TooLarge(f"it has more than {MAX_TEMPLATE:,} characters")
        self._template = _environment(of_task).from_string(source)

    def render(self, values: Mapping[str, Any]) -> Written:
        """What the template makes of values, which must be plain ones, as JSON has them.

        Raises:
          jinja2.TemplateError: see `TooLarge`, and whatever is wrong in the template.
          Exception: what its operations raise, such as `TypeError`.
        """
        run = _Run()
        token = _RUN.set(run)
        try:
            for piece in self._template.generate(**values):
                run.written.append(piece)
                run.length += len(piece)
                _check_size(run.length)
        finally:
            _RUN.reset(token)
        text = "".join(run.written)
        for begin, body in run.generations:
            if text[begin : begin + len(body)] != body:
                raise jinja2.TemplateError("{% generation %} stands inside of a macro or a block that is kept")
        return Written(text, tuple((begin, begin + len(body)) for begin, body in run.generations if body))


@dataclasses.dataclass
class _Run:
    """How far a template is: what was written, and what that took."""

    written: list[str] = dataclasses.field(default_factory=list)
    length: int = 0
    generations: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    steps: int = 0
    shown: int = 0

    def step(self, chars: int) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TooLarge(f"it takes more than {MAX_STEPS:,} steps")
        self.show(chars)

    def show(self, chars: int) -> None:
        self.shown += chars
        _check_size(self.shown)


_RUN: contextvars.ContextVar[_Run | None] = contextvars.ContextVar("run", default=None)


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise TooLarge(f"it writes more than {MAX_CHARS:,} characters")


def _sized(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_size(len(value))
    return value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: writes its body, and notes where."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        body, run = caller(), _RUN.get()
        if run is not None:
            run.generations.append((run.length, body))
        return body


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which steps and sizes are counted."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, of_task: bool) -> None:
        super().__init__(
            trim_blocks=not of_task,
            lstrip_blocks=not of_task,
            keep_trailing_newline=of_task,
            undefined=jinja2.StrictUndefined if of_task else jinja2.Undefined,
            finalize=_shown,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        for name in _WITHOUT_FILTERS:
            del self.filters[name]
        self.filters.update(
            tojson=_to_json,
            sized=_sized,
            replace=_checked_replace(self.filters["replace"]),
            join=_checked_join(self.filters["join"]),
            indent=_checked_indent(self.filters["indent"]),
        )
        if of_task:
            self.filters["regex_replace"] = _regex_replace
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise, strftime_now=_now, dict=_make_dict, namespace=_make_namespace)

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        _count_steps(source)
        return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str) and _WIDTH.search(left):
            raise TooLarge(f"the format {left[:40]!r} has a width")
        if operator == "+":
            _check_size(_length(left) + _length(right))
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, int) and isinstance(other, str | list | tuple):
                    _check_size(max(one, 0) * len(other))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * max(right, 0)
            if size > _MAX_BITS:
                raise TooLarge(f"a number has more than {_MAX_BITS} bits")
        return _sized(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str) and name == "replace" and len(args) >= 2:
            _check_replacement(owner, *args[:2])
        if isinstance(owner, str) and name == "join" and args:
            args = (_joinable(args[0], owner), *args[1:])
        return _sized(super().call(context, function, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _WITHOUT_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDTH.search(value.__self__):
            raise TooLarge(f"the format {value.__self__[:40]!r} has a width")
        return wrapped

    def step(self, chars: int) -> None:
        run = _RUN.get()
        if run is not None:
            run.step(chars)

    def concatenate(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


@functools.cache
def _environment(of_task: bool) -> _Environment:
    return _Environment(of_task)


def _count_steps(node: jinja2.nodes.Node) -> None:
    """Changes a parsed template so that what repeats counts its steps, and what keeps a text is bounded."""
    nodes = jinja2.nodes
    for child in node.iter_child_nodes():
        _count_steps(child)
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(node, name, _concatenation(value))
        elif isinstance(value, list):
            value[:] = [_concatenation(item) if isinstance(item, nodes.Concat) else item for item in value]
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
        chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        call = nodes.Call(nodes.EnvironmentAttribute("step"), [nodes.Const(chars)], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
    if isinstance(node, nodes.AssignBlock):
        node.filter = nodes.Filter(node.filter, "sized", [], [], None, None, lineno=node.lineno)  # pyright: ignore
    if isinstance(node, nodes.NSRef) and node.attr.startswith("_"):
        raise jinja2.TemplateSyntaxError(f"a namespace cannot hold {node.attr[:40]!r}", node.lineno)


def _concatenation(node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
    function = jinja2.nodes.EnvironmentAttribute("concatenate")
    return jinja2.nodes.Call(function, node.nodes, [], None, None).set_lineno(node.lineno)


def _shown(value: Any) -> Any:
    """Counts what an expression writes."""
    run = _RUN.get()
    if run is not None:
        run.show(_length(value))
    return value


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _now(form: str) -> str:
    if _WIDTH.search(form):
        raise TooLarge(f"the format {form[:40]!r} has a width")
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    _check_indent(indent)
    return _sized(
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )


def _regex_replace(text: str, pattern: str, replacement: str, count: int = 0) -> str:
    _check_replacement(text, "", replacement)
    return _sized(re.sub(pattern, replacement, text, count=count))


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _make_namespace(*args: Any, **kwargs: Any) -> jinja2.utils.Namespace:
    values = dict(*args, **kwargs)
    for name in values:
        if str(name).startswith("_"):
            raise jinja2.TemplateError(f"a namespace cannot hold {name!r:.40}")
    return jinja2.utils.Namespace(values)


def _check_replacement(text: str, old: Any, new: Any) -> None:
    count = text.count(str(old)) if old else len(text) + 1
    _check_size(len(text) + count * len(str(new)))


def _checked_replace(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replace(eval_context: Any, value: Any, old: str, new: str, count: int | None = None) -> Any:
        _check_replacement(str(value), old, new)
        return original(eval_context, value, old, new, count)

    return replace


def _joinable(values: Iterable[Any], separator: Any) -> list[Any]:
    """Values to be joined, of which the result is not too long."""
    kept, size = [], 0
    for value in values:
        kept.append(value)
        size += _length(value) + _length(separator)
        _check_size(size)
    return kept


def _checked_join(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def join(eval_context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        return _sized(original(eval_context, _joinable(value, d), d, attribute))

    return join


def _check_indent(width: Any) -> None:
    if _length(width) > _MAX_INDENT or (isinstance(width, int) and width > _MAX_INDENT):
        raise TooLarge(f"an indentation is wider than {_MAX_INDENT}")


def _checked_indent(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def indent(text: str, width: Any = 4, first: bool = False, blank: bool = False) -> Any:
        _check_indent(width)
        return _sized(original(text, width, first, blank))

    return indent
