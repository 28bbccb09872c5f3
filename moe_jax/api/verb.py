"""Turns a function that takes a spec into a verb: its options become keywords, in type, signature and help."""

import functools
import inspect
import os
import textwrap
from collections.abc import Callable, Mapping
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
    """A verb that turns one model into another; `P` are the options of its spec."""

    @overload
    def __call__(self, model: ModelOrPath, out: OutPath, spec: S_contra, /) -> Model: ...
    @overload
    def __call__(self, model: ModelOrPath, out: OutPath = None, *args: P.args, **kwargs: P.kwargs) -> Model: ...


class FileVerb(Protocol[P, S_contra]):  # pyright: ignore[reportInvalidTypeVarUse]
    """A verb that writes a model for other programs; `P` are the options of its spec."""

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
    """Decorates `do(model, out, spec)` as `model_verb` does, for a verb that requires `out`."""
    return lambda do: cast(FileVerb[P, S], _with_options(spec, do, out=inspect.Parameter.empty))


def work_bars() -> AbstractContextManager[Bars]:
    """Returns the progress bars of a verb: shown in a command, by the first process only."""
    return progress_bars(shown=shows_work() and is_first_process())


def _with_options(spec: Any, do: F, *, out: Any) -> F:
    # With the verb's parameters but the spec, the options of the spec.
    first, second, _ = inspect.signature(do).parameters.values()
    parameters = [first, second.replace(default=out), *spec.parameters()]
    empty, name = out is not inspect.Parameter.empty, spec.verb()

    names = (first.name, second.name, "spec")

    @functools.wraps(do)
    def verb(*given: Any, **options: Any) -> Any:
        if len(given) > len(names):
            raise TypeError(
                f"{name}() takes {', '.join(names)}, and options by their names; got {len(given)} arguments"
            )
        places = dict(zip(names, given, strict=False))
        for place in names:
            if place in options and place in places:
                raise TypeError(f"{name}() got two values for {place}")
        places |= {place: options.pop(place) for place in names if place in options}
        missing = [place for place in names[: 1 if empty else 2] if place not in places]
        if missing:
            but = f"; it has no option {', '.join(options)}" if options else ""
            raise TypeError(f"{name}() is missing {' and '.join(missing)}{but}")
        for place in names[:2]:
            if isinstance(places.get(place), Spec | Mapping):
                raise TypeError(f"{name}(): {place} is a {type(places[place]).__name__}; a spec is the third argument")
        made = places.get("spec")
        if made is None:
            made = spec.of(options)
        elif options or not isinstance(made, spec):
            wrong = f"also {', '.join(options)}" if options else f"a {type(made).__name__}"
            raise InputError(f"{name}() takes the spec {spec.__name__} or its fields as keywords; got {wrong}")
        return do(places[first.name], places.get(second.name), made)

    returned = inspect.signature(do).return_annotation
    verb.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # pyright: ignore[reportAttributeAccessIssue]
    verb.__doc__ = _documented(inspect.getdoc(do) or "", spec.list_options())
    return cast(F, verb)


def _documented(text: str, options: list[Option]) -> str:
    """Returns the docstring of a verb, with its options instead of its spec among the arguments."""
    lines = [
        textwrap.fill(
            f"{option.name}: {option.text}", 118, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
        for option in options
    ]
    head, found, tail = text.partition("\n  spec: ")
    return f"{head}\n{chr(10).join(lines)}\n{tail.partition(chr(10))[2]}" if found else text
