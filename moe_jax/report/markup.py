"""HTML that is safe by construction: what is not `Markup` is text, and is escaped."""

import html
from typing import Any

_VOID = frozenset({"br", "hr", "img", "meta", "source"})


class Markup(str):
    """Text that is HTML already."""


EMPTY = Markup("")


def element(name: str, /, *children: "str | Markup | None", **attributes: Any) -> Markup:
    """An element.

        >>> element("p", "1 < 2, ", element("b", "yes"), class_="note")
        '<p class="note">1 &lt; 2, <b>yes</b></p>'

    Args:
      name: of the element.
      children: what is in it; strings are escaped, None is left out.
      **attributes: an underscore at the end of a name is dropped, others are hyphens; without the values None and
        False, and with True as an attribute without a value.
    """
    words = [name]
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(attribute)
        elif value is not None and value is not False:
            words.append(f'{attribute}="{escaped(str(value))}"')
    opening = f"<{' '.join(words)}>"
    return Markup(opening if name in _VOID else f"{opening}{joined(*children)}</{name}>")


def joined(*parts: "str | Markup | None") -> Markup:
    """Parts one after another; strings are escaped, None is left out."""
    return Markup("".join(part if isinstance(part, Markup) else escaped(part) for part in parts if part is not None))


def escaped(text: str) -> Markup:
    """The text as HTML. What no page may hold (control characters, halves of characters) is replaced by `�`."""
    shown = "".join(c if c.isprintable() or c in "\n\t" or not _is_forbidden(c) else "\ufffd" for c in text)
    return Markup(html.escape(shown))


def _is_forbidden(character: str) -> bool:
    code = ord(character)
    return code < 0x20 or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code & 0xFFFE == 0xFFFE
