"""The progress of work on the layers of a model that several processes share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.processes import has_coordination, is_first_process, news, tell_first

# Seconds between two looks of the first process for messages of the others, while it waits for them.
_LOOKS_EVERY = 0.5


class Board:
    """The progress of the work on layers, which the first process shows, also of those that other processes work on.

    `in_turn` is called there for every layer, in order, with its result, as soon as the layers before it are done.
    """

    def __init__(
        self,
        what: str,
        layers: Sequence[int],
        progress: Progress,
        *,
        in_turn: Callable[[int, Any], object] = lambda layer, found: None,
        shared: bool,
    ):
        self._what, self._layers, self._in_turn = what, tuple(layers), in_turn
        self._shared = shared and jax.process_count() > 1
        self._shows = is_first_process() or not self._shared
        self._progress = progress if self._shows else no_progress
        self._found: dict[int, Any] = {}
        self._shown = 0
        self._progress(what, 0, len(layers))

    def working(self, share: float) -> None:
        """Reports what share of the next layer this process has done."""
        self._hear()
        self._progress(self._what, min(len(self._found) + share, len(self._layers)), len(self._layers))

    def done(self, layer: int, found: Any) -> None:
        """Reports a layer that is done. Its result is JSON-able if the work is shared."""
        if self._shows:
            self._hear()
            self._put(layer, found)
        else:
            tell_first([self._what, layer, found])

    def wait(self) -> None:
        """Waits, in the first process, for the others, and shows their progress."""
        while self._shows and self._shared and has_coordination() and len(self._found) < len(self._layers):
            self._hear(_LOOKS_EVERY)

    def complete(self, found: Mapping[int, Any]) -> None:
        """Shows all layers that have not been shown yet."""
        for layer in self._layers:
            if self._shows and layer not in self._found:
                self._put(layer, found[layer])

    def _hear(self, seconds: float = 0.0) -> None:
        for what, layer, found in news(seconds) if self._shared else ():
            if what == self._what:
                self._put(layer, found)

    def _put(self, layer: int, found: Any) -> None:
        self._found[layer] = found
        self._progress(self._what, len(self._found), len(self._layers))
        while self._shown < len(self._layers) and self._layers[self._shown] in self._found:
            layer = self._layers[self._shown]
            self._shown += 1
            self._in_turn(layer, self._found[layer])
