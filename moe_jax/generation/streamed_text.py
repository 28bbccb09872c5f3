"""The text of tokens as they come: whole characters only, and nothing of a stop string.

What is handed out piece by piece is, put together, what is handed out at once: no piece is taken back.
"""

from collections.abc import Callable, Sequence

from moe_jax.core.errors import InputError

_BROKEN = "\ufffd"  # how bytes are shown that are no character

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Text of one row of tokens after another text.

    A token's text depends on what stands before it (some decoders take the first space of a text away) and on what
    comes after it (a character may be several tokens). So tokens are decoded together with those of the piece before,
    and bytes that may be half a character wait for the next token.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()):
        """Begins after the tokens `before`; `decode` gives the text of ids."""
        self._decode = decode
        self._window = list(before)
        self._given = decode(self._window)
        self._before = len(self._window)

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is certain with it."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_BROKEN):
            return ""
        new = self._new(text)
        if new:  # these tokens are the context of what comes
            self._window = self._window[self._before :]
            self._before, self._given = len(self._window), self._decode(self._window)
        return new

    def finish(self) -> str:
        """Returns the text that waited for another token, now that none comes."""
        return self._new(self._decode(self._window))

    def _new(self, text: str) -> str:
        for given in (self._given, self._given.rstrip(_BROKEN)):  # half a character may have been made whole
            if text.startswith(given):
                return text[len(given) :]
        # Some decoders show a run of bytes as broken as a whole, with the characters before that were whole.
        return self._decode(self._window[self._before :])


class StreamedText:
    """Text of one row of tokens until a stop string, which is no part of it.

    Attributes:
      text: what was handed out.
      stopped_by: the stop string that ended the text; None: none has.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), before: Sequence[int] = ()):
        """Begins a text.

        Args:
          decode: gives the text of ids.
          stop: strings that end the text, none of them empty (`checked_stops`); of two, the one that begins first.
          before: tokens of the text before.
        """
        self.text = ""
        self.stopped_by: str | None = None
        self._stop = tuple(stop)
        self._held = ""
        self._tokens = Detokenizer(decode, before)

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is certain with it. The possible beginning of a stop string waits."""
        return self._take(self._tokens.push(token), ends=False)

    def finish(self) -> str:
        """Returns the text that waited, now that no token comes any more."""
        return self._take(self._tokens.finish(), ends=True)

    def _take(self, new: str, *, ends: bool) -> str:
        if self.stopped_by is not None:
            return ""
        held = self._held + new
        found = [(held.find(stop), order) for order, stop in enumerate(self._stop) if stop in held]
        if found:
            at, order = min(found)
            self.stopped_by = self._stop[order]
        else:
            at = len(held) if ends else len(held) - max((_overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[at:]
        self.text += held[:at]
        return held[:at]


def checked_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the stop strings as a tuple.

    Raises:
      InputError: if one is empty, or none is a string.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(one, str) and one for one in stops):
        raise InputError("a stop string must be a text of at least one character")
    return stops


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins, but less than all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
