"""Texts of the attributes of a dataclass, read from its docstring: help texts have no other source."""

import inspect
import re


def attribute_texts(cls: type) -> dict[str, str]:
    """The texts under `Attributes:` in the docstrings of a class and its bases, by the name of the attribute."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        for entry in re.finditer(r"^  (\w+(?:, \w+)*): (.*(?:\n    .*)*)", section, re.MULTILINE):
            texts |= dict.fromkeys(entry[1].split(", "), " ".join(entry[2].split()))
    return texts
