"""How configs are shown: as the call that makes them, without what has its default."""

import dataclasses
from typing import Any

from moe_jax.core.errors import shown


def short_repr(self: Any, **texts: str) -> str:
    """Returns a dataclass as the call that makes it, without the fields that have their default: its `__repr__`.

    Of long values, such as lists of numbers, it has the beginning. `texts` has fields by name that are written in
    another way.
    """
    written = []
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is dataclasses.MISSING or value != default:
            text = repr(value) if dataclasses.is_dataclass(value) else shown(value)
            written.append(f"{field.name}={texts.get(field.name, text)}")
    return f"{type(self).__name__}({', '.join(written)})"
