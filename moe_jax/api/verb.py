"""Makes a verb of a function that takes a spec: its options become keywords, in type, signature and help."""

import functools
import inspect
import os
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

from moe_jax.api.model import Model, ModelOrPath, OutPath
from moe_jax.core.errors import InputError
from moe_jax.core.terminal import Bars, progress_bars, shows_work
from moe_jax.core.verb_spec import Option, Spec
from moe_jax.distributed.processes import is_first_process

P = ParamSpec("P")
S = TypeVar("S", bound=Spec)
S_contra = TypeVar("S_contra", bound=Spec, contravariant=True)
F = TypeVar("F", bound=Callable[..., Any])


class ModelVerb(Protocol[P, S_contra]):  # pyright: ignore[reportInvalidTypeVarUse]
    """A verb that makes a model of a model; `P` are the options of its spec."""

    @overload
    def __call__(self, model: ModelOrPath, out: OutPath, spec: S_contra, /) -> Model: ...
    @overload
    def __call__(self, model: ModelOrPath, out: OutPath = None, *args: P.args, **kwargs: P.kwargs) -> Model: ...


class FileVerb(Protocol[P, S_contra]):  # pyright: ignore[reportInvalidTypeVarUse]
    """A verb that writes a model for others; `P` are the options of its spec."""

    @overload
    def __call__(self, model: ModelOrPath, out: str | os.PathLike[str], spec: S_contra, /) -> Path: ...
    @overload
    def __call__(self, model: ModelOrPath, out: str | os.PathLike[str], *args: P.args, **kwargs: P.kwargs) -> Path: ...


def model_verb(spec: Callable[P, S]) -> Callable[[Callable[[ModelOrPath, OutPath, S], Model]], ModelVerb[P, S]]:
    """Decorates `do(model, out, spec)`, so that it is also called with the options of the spec as keywords."""
    return lambda do: cast(ModelVerb[P, S], _with_options(spec, do, out=None))


def file_verb(
    spec: Callable[P, S],
) -> Callable[[Callable[[ModelOrPath, str | os.PathLike[str], S], Path]], FileVerb[P, S]]:
    """The same for a verb that must be told where to write."""
    return lambda do: cast(FileVerb[P, S], _with_options(spec, do, out=inspect.Parameter.empty))


def work_bars() -> AbstractContextManager[Bars]:
    """Bars of progress of a verb: of a command, in the first process, and otherwise none."""
    return progress_bars(shown=shows_work() and is_first_process())


def _with_options(spec: Any, do: F, *, out: Any) -> F:
    # With the verb's parameters but the spec, the options of the spec.
    first, second, _ = inspect.signature(do).parameters.values()
    parameters = [first, second.replace(default=out), *spec.parameters()]
    empty = () if out is inspect.Parameter.empty else (out,)

    @functools.wraps(do)
    def verb(*given: Any, **options: Any) -> Any:
        places = {name: options.pop(name) for name in (first.name, second.name, "spec") if name in options}
        names = (first.name, second.name, "spec")
        if len(given) > len(names) or (not given and first.name not in places):
            raise TypeError(f"{do.__name__}() takes {first.name}, {second.name} and options by their names")
        places |= dict(zip(names, given, strict=False))
        made = places.get("spec")
        if made is None:
            made = spec.of(options)
        elif options or not isinstance(made, spec):
            raise InputError(f"{do.__name__} takes a {spec.__name__} or its fields, not both or another one")
        if second.name not in places and not empty:
            raise TypeError(f"{do.__name__}() needs {second.name}")
        return do(places[first.name], places.get(second.name), made)

    verb.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    verb.__doc__ = _documented(inspect.getdoc(do) or "", spec.list_options())
    return cast(F, verb)


def _documented(text: str, options: list[Option]) -> str:
    """The docstring of a verb, with its options instead of its spec among the arguments."""
    lines = [
        textwrap.fill(
            f"{option.name}: {option.text}", 118, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
        for option in options
    ]
    head, found, tail = text.partition("\n  spec: ")
    return f"{head}\n{chr(10).join(lines)}\n{tail.partition(chr(10))[2]}" if found else text
