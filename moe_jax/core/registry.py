"""Parts that a config refers to by name: those of the library, and those of users, which they register themselves."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from moe_jax.core.errors import InputError, check_member, shown

T = TypeVar("T")
_Cached = TypeVar("_Cached", bound=Callable[..., Any])
_forget: list[Callable[[], None]] = []


def forgets_replaced(cached: _Cached) -> _Cached:
    """Decorates a function with an `lru_cache` over configs: it is emptied when a part gets another one's name."""
    _forget.append(cached.cache_clear)  # pyright: ignore[reportFunctionMemberAccess]
    return cached


_NAME = re.compile(r"[A-Za-z_][\w.-]{0,99}(:[A-Za-z_][\w.-]{0,99})?")


class Registry(dict[str, T], Generic[T]):
    """The parts of one kind, such as gates, by name.

    A part of a user's own is best named by its import path, `package.module:name`: the name is in the config of every
    model with it, and says what to import before such a model is opened. Nothing is imported for a name.
    """

    def __init__(self, kind: str, of_library: Mapping[str, T], *, reserved: Iterable[str] = ()):
        """Begins with the parts of the library, whose names are never given to others; nor are the `reserved` ones."""
        super().__init__(of_library)
        self.kind = kind
        self._of_library = frozenset(of_library) | frozenset(reserved)

    def register(self, name: str, part: T) -> None:
        """Adds a part; of two with one name, as when a cell of a notebook is run again, the later one counts.

        Raises:
          InputError: if the name is one of the library's, or has other characters than an import path has; or for what
            cannot be called.
        """
        self.check_new(name, part)
        if name in self and self[name] is not part:
            # What was made or compiled has the earlier part under the same name.
            for forget in _forget:
                forget()
            if (jax := sys.modules.get("jax")) is not None:
                jax.clear_caches()
        self[name] = part

    def check_new(self, name: str, part: T) -> None:
        """Raises `InputError` as `register` does."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError(f"{self.kind} {shown(name)}: expected a name such as 'package.module:name'")
        if name in self._of_library:
            raise InputError(f"{self.kind} {name!r} is one of the library's; choose another name")
        if not callable(part) and not isinstance(part, tuple):
            raise InputError(f"{self.kind} {name!r} would be {shown(part)}, which cannot be called")

    def own(self) -> frozenset[str]:
        """Returns the names that users have registered."""
        return frozenset(self) - self._of_library

    def check(self, what: str, name: str, *, others: Iterable[str] = ()) -> None:
        """Raises `InputError`, in which the value of `what` is `name`, unless there is a part of this name.

        The `others` are names that are allowed here, too.
        """
        if isinstance(name, str) and name not in self and ":" in name and _NAME.fullmatch(name):
            module = name.partition(":")[0]
            raise InputError(
                f"{what} {shown(name)} is a part of someone's own, and not registered; if you trust the model, import "
                f"what registers it first: import {module}, or moe-jax --import {module}"
            )
        check_member(what, name, (*self, *others))
