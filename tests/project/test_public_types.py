"""Every class in the signature of something public is public itself, so that programs of others can name it."""

import ast
import functools
import importlib
import inspect
import operator
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import moe_jax

ROOMS = [name for name in dir(moe_jax) if name[0] != "_" and inspect.ismodule(getattr(moe_jax, name))]
NAMESPACES = [moe_jax, *(operator.attrgetter(name)(moe_jax) for name in (*ROOMS, "experts.forms"))]

# By the name of the class, why it has no public one.
NOT_PUBLIC = {
    "Option": "commands list the options of a verb",
    "Shown": "a part of `Option`",
    "Router": "a stack tells its decoder which routers report",
    "FormOfAdapter": "`adapt` asks its options for it",
    "InTriton": "forms may be made in Triton, and none need to be",
}
# Its kernels are for platforms; functions choose them.
NOT_PUBLIC_ROOM = "moe_jax.kernels."


def is_ours(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "").startswith("moe_jax.")


def classes_in(hint: Any) -> Iterator[type]:
    """Yields the classes of the library in an annotation."""
    if isinstance(hint, type) and is_ours(hint):
        yield hint
    for part in hint if isinstance(hint, list) else typing.get_args(hint):
        yield from classes_in(part)


def annotated(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yields what has annotations, with its name: a function, or a class and those of its members that are public."""
    yield getattr(thing, "__name__", repr(thing)), inspect.unwrap(thing)
    for name in dir(thing) if isinstance(thing, type) else ():
        member = inspect.getattr_static(thing, name)
        member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        function = inspect.unwrap(getattr(member, "func", member))
        is_public = not name.startswith("_") or name.startswith("__")
        if is_public and isinstance(function, types.FunctionType) and is_ours(function):
            yield f"{thing.__name__}.{name}", function


def hints_of(thing: Any) -> dict[str, Any]:
    """Returns the annotations of a class or a function, evaluated."""
    for_types: dict[str, Any] = {"ArrayTree": Any}  # by which Optax's type of a state names itself
    for base in getattr(thing, "__mro__", (thing,)):
        if is_ours(base):
            for_types |= imported_for_types(sys.modules[base.__module__])
    hints = typing.get_type_hints(thing, localns=for_types) if is_ours(thing) else {}
    return {name: hint for name, hint in hints.items() if not name.startswith("_")}


@functools.cache
def imported_for_types(module: types.ModuleType) -> dict[str, Any]:
    """Returns the names that a module imports for annotations alone, under `if TYPE_CHECKING`."""
    found = {}
    for block in ast.parse(inspect.getsource(module)).body:
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test):
            for statement in block.body:
                assert isinstance(statement, ast.ImportFrom | ast.Import)
                for alias in statement.names:
                    source = importlib.import_module(getattr(statement, "module", alias.name))
                    found[alias.asname or alias.name] = getattr(source, alias.name, source)
    return found


def missing(public: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the classes without a public name, and where they are met: also in those that are met so."""
    named, found = {id(thing) for thing in public.values()}, {}
    waiting, seen = list(public.values()), set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        met = [("an alias", one) for one in classes_in(thing)] if not callable(thing) else []
        for name, part in annotated(thing) if callable(thing) else ():
            met += [
                (f"{name}({argument})", one) for argument, hint in hints_of(part).items() for one in classes_in(hint)
            ]
        for where, one in met:
            if id(one) not in named:
                found.setdefault(f"{one.__module__}.{one.__qualname__}", []).append(where)
                waiting.append(one)
    return found


def test_every_class_in_a_public_signature_is_public():
    public = {
        f"{namespace.__name__}.{name}": getattr(namespace, name)
        for namespace in NAMESPACES
        for name in dir(namespace)
        if not name.startswith("_") and not inspect.ismodule(getattr(namespace, name))
    }
    assert {"moe_jax.load", "moe_jax.nn.Decoder", "moe_jax.nn.filters.routers", "moe_jax.typing.Tokenizer"} <= set(
        public
    )
    found = {name: where for name, where in missing(public).items() if not name.startswith(NOT_PUBLIC_ROOM)}
    names = {name.rpartition(".")[2] for name in found}
    assert names <= set(NOT_PUBLIC), f"give them a name in a public namespace: {found}"
    assert names == set(NOT_PUBLIC), "some are public by now, or no longer met"


def test_what_is_looked_at():
    class Result(typing.NamedTuple):
        parts: "dict[str, list[Part]]"

    class Part:
        pass

    Result.__module__ = Part.__module__ = "moe_jax.core.errors"
    Result.__annotations__["parts"] = dict[str, list[Part]]

    def verb(**given: Any) -> typing.Annotated[Result | None, "text"]: ...

    verb.__module__ = "moe_jax.core.errors"
    at = f"moe_jax.core.errors.{test_what_is_looked_at.__name__}.<locals>"
    assert missing({"verb": verb}) == {f"{at}.Result": ["verb(return)"], f"{at}.Part": ["Result(parts)"]}
    assert missing({"verb": verb, "Result": Result, "Part": Part}) == {}
