"""Layers that several processes work on, each on its own: what of it the first process shows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from moe_jax.core.terminal import Progress, no_progress
from moe_jax.distributed.processes import has_coordination, is_first_process, news, tell_first

# While the first process waits for others, it looks so often, in seconds, whether they have told it something.
_LOOKS_EVERY = 0.5


class Board:
    """How far the work on layers is, in all processes that share it.

    The first process hears of the layers of the others while it works, and shows them as its own. One process has all
    layers where nothing is shared.

    Args:
      what: the work, as `Progress` calls it.
      layers: all of them, in turn.
      progress: called in the first process.
      in_turn: called there for every layer, in turn, with what was found out about it, as soon as those before it are
        done.
      shared: whether there are other processes at it.
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
        """Says what share of the next layer this process has done."""
        self._hear()
        self._progress(self._what, min(len(self._found) + share, len(self._layers)), len(self._layers))

    def done(self, layer: int, found: Any) -> None:
        """Says that a layer is done: by this process, or before.

        Args:
          layer: its index.
          found: about it; JSON-able where the work is shared.
        """
        if self._shows:
            self._hear()
            self._put(layer, found)
        else:
            tell_first([self._what, layer, found])

    def wait(self) -> None:
        """In the first process, waits for the others, and shows what they do."""
        while self._shows and self._shared and has_coordination() and len(self._found) < len(self._layers):
            self._hear(_LOOKS_EVERY)

    def complete(self, found: Mapping[int, Any]) -> None:
        """Shows what is not shown yet of all layers."""
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
