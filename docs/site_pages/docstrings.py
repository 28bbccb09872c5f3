"""Docstrings of the library as Sphinx reads them: names in backticks are links where they are public, code elsewhere.

The sections (`Args:`, `Returns:`, ...) are those that napoleon knows.
"""

import inspect
import re
import sys
import types
import typing
from typing import Any

from site_pages.names import homes, resolve

_SPECIAL = re.compile(r"([*|\\]|_(?!\w))")
_ARRAY = "jaxlib._jax.Array"  # what `jax.Array` calls itself
_SECTION = re.compile(r"^Attributes:\n((?:  .*\n?|\n(?=  ))*)", re.MULTILINE)
_EXAMPLE = re.compile(r"^[ ]*>>> .*(?:\n.*\S.*)*", re.MULTILINE)


def with_links(text: str, own: typing.Collection[str] = ()) -> str:
    """Returns a text as reStructuredText; `own` are the names that belong to what the text is about."""
    parts, end = [], 0
    for example in _EXAMPLE.finditer(text):
        parts += [_inline(text[end : example.start()], own), example[0]]
        end = example.end()
    return "".join(parts) + _inline(text[end:], own)


def _inline(text: str, own: typing.Collection[str]) -> str:
    parts = re.split(r"`([^`]+)`", text)
    parts[::2] = [_SPECIAL.sub(r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [_code(" ".join(part.split()), own) for part in parts[1::2]]
    # Markup begins and ends at the ends of words, or where this says so.
    for at in range(0, len(parts), 2):
        if at and re.match(r"\w", parts[at]):
            parts[at] = "\\ " + parts[at]
        if at + 1 < len(parts) and re.search(r"[^\s(\[{<\-/:'\"]$", parts[at]):
            parts[at] += "\\ "
    return "".join(parts)


def _code(written: str, own: typing.Collection[str]) -> str:
    target = None if written in own else resolve(written)
    return f":py:obj:`{written} <{target}>`" if target else f"``{written}``"


def dedented_examples(text: str) -> str:
    """Returns a text whose examples stand at its left edge and not in it, where they would be quotations."""
    return _EXAMPLE.sub(lambda found: re.sub("^    ", "", found[0], flags=re.MULTILINE), text)


def prepare(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Makes a docstring reStructuredText with napoleon's sections, in place."""
    text = "\n".join(lines)
    if text.startswith("Attributes:\n") and not text.startswith("Attributes:\n "):
        text = text.replace("\n", "\n  ")
    text = re.sub(r":\n(\n {4,}(?!>>> )(?! )\S)", r"::\n\1", text)  # an indented block is code
    text = re.sub(r"^Create new instance of .*", "", text, flags=re.MULTILINE)  # of every named tuple
    text = with_links(dedented_examples(text), own_names(thing))
    if inspect.isclass(thing):
        text = _SECTION.sub(lambda section: _attributes(thing, section[1]), text)
    lines[:] = text.splitlines()
    if what in ("attribute", "property", "data"):
        lines.insert(0, "")  # napoleon takes what comes before a colon in the first line for a type


def own_names(thing: Any) -> set[str]:
    """Returns the names of the parameters of a function, or of what makes a class."""
    try:
        return set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return set()


def _attributes(owner: type, section: str) -> str:
    """Returns the entries of `Attributes:` with the types that the class says, which napoleon would not look up."""
    hints: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        hints |= vars(base).get("__annotations__", {})
    parts = []
    for entry in re.finditer(r"^  (\w+(?:, \w+)*): (.*(?:\n    .*)*)", section, re.MULTILINE):
        for name in entry[1].split(", "):
            kind = f"\n   :type: {readable(hints[name])}" if name in hints else ""
            parts.append(f".. attribute:: {name}{kind}\n\n   {' '.join(entry[2].split())}\n\n")
    return "\n".join(parts)


def sign(app: Any, what: str, name: str, thing: Any, options: Any, signature: Any, returned: Any) -> Any:
    """Returns the signature of a function or class as the source has it: shapes as jaxtyping writes them."""
    if what not in ("class", "function", "method"):
        return None
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return None
    parameters = list(found.parameters.values())
    if what == "method" and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    shown = found.replace(parameters=[_Shown.of(one) for one in parameters], return_annotation=inspect.Signature.empty)
    result = None if what == "class" or found.return_annotation is found.empty else readable(found.return_annotation)
    return str(shown), result


class _Shown:
    """Prints as it is written."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text

    @classmethod
    def of(cls, parameter: inspect.Parameter) -> inspect.Parameter:
        """Returns a parameter whose annotation and default print readably."""
        if parameter.annotation is not parameter.empty:
            parameter = parameter.replace(annotation=cls(readable(parameter.annotation)))
        default = parameter.default
        if default is parameter.empty:
            return parameter
        if isinstance(default, types.FunctionType | type):
            parameter = parameter.replace(default=cls(default.__name__))
        elif " at 0x" in repr(default):
            parameter = parameter.replace(default=cls("..."))
        return parameter


def readable(hint: Any) -> str:
    """Returns an annotation as one writes it: `Float[Array, "T d"]`, full names where the name is public."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is types.NoneType:
        return "None"
    if isinstance(hint, str | typing.ForwardRef):
        return getattr(hint, "__forward_arg__", hint)
    if hasattr(hint, "dim_str"):  # of jaxtyping
        return re.sub(r"(?:\w+\.)+(\w+)", r"\1", hint.__name__)
    if isinstance(hint, list):
        return f"[{', '.join(map(readable, hint))}]"
    if origin is typing.Annotated:
        return readable(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(readable, arguments))
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is not None and arguments:
        return f"{readable(origin)}[{', '.join(map(readable, arguments))}]"
    if hint is ...:
        return "..."
    return homes().get(id(hint)) or _of_others(hint)


def _of_others(hint: Any) -> str:
    """Returns the name of what is not public here: of another library, or inside this one."""
    name = getattr(hint, "__qualname__", None) or getattr(hint, "__name__", None) or repr(hint)
    library = getattr(hint, "__module__", "").partition(".")[0]
    for short in ("flax.nnx", "jax.sharding", "jax", "numpy"):
        # Where they are defined, and where their manuals say that they are.
        if short.startswith(library.removesuffix("lib")) and getattr(sys.modules.get(short), name, None) is hint:
            return f"~{short}.{name}"
    return name if library in ("builtins", "moe_jax", "") else f"~{hint.__module__}.{name}"


def show_bases(app: Any, name: str, thing: Any, options: Any, bases: list[Any]) -> None:
    """Leaves only the public ones among the bases of a class, in place."""
    bases[:] = [base for base in bases if id(typing.get_origin(base) or base) in homes()]


def tidy(app: Any, document: Any) -> None:
    """Mends a page that was read, in place: references to others, and types that autodoc wrote itself."""
    for node in list(document.findall()):
        # A name of others, such as `bytes`, is looked for under this name alone, and not in what is documented here.
        if getattr(node, "attributes", {}).get("refdomain") == "py" and not node["reftarget"].startswith("moe_jax"):
            for key in ("refspecific", "py:module", "py:class"):
                node.attributes.pop(key, None)
        if node.tagname == "#text" and _ARRAY in node:
            node.parent.replace(node, type(node)(node.replace(_ARRAY, "Array")))
