"""The public names: the namespaces that they are in, and the one place where each is explained."""

import functools
import inspect
import operator
from types import ModuleType
from typing import Any

import moe_jax

# Inside a namespace, a namespace.
NESTED = ("experts.forms",)


@functools.cache
def namespaces() -> dict[str, ModuleType]:
    """Returns the public modules by their full names, in the order of the index of `moe_jax`."""
    rooms = [name for name in moe_jax.__all__ if inspect.ismodule(getattr(moe_jax, name))]
    index = moe_jax.__doc__ or ""
    rooms.sort(key=lambda name: index.index(f"\n    {name} "))
    inside = [name for room in rooms for name in (room, *(one for one in NESTED if one.startswith(f"{room}.")))]
    return {"moe_jax": moe_jax, **{f"moe_jax.{name}": operator.attrgetter(name)(moe_jax) for name in inside}}


def public_names(namespace: str) -> list[str]:
    """Returns the names of a namespace, sorted, without the modules in it."""
    module = namespaces()[namespace]
    return sorted(name for name in dir(module) if name[0] != "_" and not inspect.ismodule(getattr(module, name)))


@functools.cache
def homes() -> dict[int, str]:
    """Returns by the `id` of everything public the full name that it is explained under: the shortest one."""
    found: dict[int, str] = {}
    for namespace, module in namespaces().items():
        for name in public_names(namespace):
            found.setdefault(id(getattr(module, name)), f"{namespace}.{name}")
    return found


def home_of(namespace: str, name: str) -> str:
    """Returns the full name that a name of a namespace is explained under."""
    return homes()[id(getattr(namespaces()[namespace], name))]


@functools.cache
def _by_name() -> dict[str, str]:
    found: dict[str, str] = {}
    for namespace in namespaces():
        for name in public_names(namespace):
            short = f"{namespace}.{name}".removeprefix("moe_jax.")
            for written in (name, short, f"moe_jax.{short}"):
                found.setdefault(written, home_of(namespace, name))
    return found


def resolve(written: str) -> str | None:
    """Returns the full name of what a docstring names, `nn.Decoder` or `Model.split`; None if it is not public."""
    if written in namespaces():
        return written
    if (home := _by_name().get(written)) is not None:
        return home
    owner, _, member = written.rpartition(".")
    home = _by_name().get(owner)
    if home is None or not inspect.isclass(owner_class := thing_at(home)) or member.startswith("_"):
        return None
    return f"{home}.{member}" if member in vars(owner_class) else None


def thing_at(full_name: str) -> Any:
    """Returns what has a full name."""
    return operator.attrgetter(full_name.removeprefix("moe_jax."))(moe_jax)
