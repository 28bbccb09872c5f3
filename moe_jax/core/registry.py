"""Parts that a config refers to by name: those of the library, and those of users, which they register themselves."""

import re
import sys
from collections.abc import Mapping
from typing import Generic, TypeVar

from moe_jax.core.errors import InputError, check_member, shown

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,99}(:[A-Za-z_][\w.-]{0,99})?")


class Registry(dict[str, T], Generic[T]):
    """The parts of one kind, such as gates, by name.

    A part of a user's own is best named by its import path, `package.module:name`: the name is in the config of every
    model with it, and says what to import before such a model is opened. Nothing is imported for a name.
    """

    def __init__(self, kind: str, of_library: Mapping[str, T]):
        """Begins with the parts of the library, whose names are never given to others."""
        super().__init__(of_library)
        self.kind = kind
        self._of_library = frozenset(of_library)

    def register(self, name: str, part: T) -> None:
        """Adds a part; of two with one name, as when a cell of a notebook is run again, the later one counts.

        Raises:
          InputError: if the name is one of the library's, or has other characters than an import path has.
        """
        if name in self._of_library:
            raise InputError(f"{self.kind} {name!r} is one of the library's; choose another name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError(f"{self.kind} {shown(name)}: expected a name such as 'package.module:name'")
        if name in self and self[name] is not part and (jax := sys.modules.get("jax")) is not None:
            jax.clear_caches()  # what was compiled has the earlier part under the same name
        self[name] = part

    def own(self) -> frozenset[str]:
        """Returns the names that users have registered."""
        return frozenset(self) - self._of_library

    def check(self, what: str, name: str) -> None:
        """Raises `InputError`, in which the value of `what` is `name`, unless there is a part of this name."""
        if isinstance(name, str) and name not in self and ":" in name and _NAME.fullmatch(name):
            module = name.partition(":")[0]
            raise InputError(
                f"{what} {shown(name)} is not registered; import {module}, or what else registers it, before the "
                "model is opened"
            )
        check_member(what, name, self)
