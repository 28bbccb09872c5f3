"""What the first of several processes shows of the layers of all."""

import pytest

from moe_jax.compression import board
from moe_jax.compression.board import Board


@pytest.fixture
def said(monkeypatch) -> list:
    """What the other process of two says, one after another; this one is the first."""
    said: list = []
    monkeypatch.setattr(board.jax, "process_count", lambda: 2)
    monkeypatch.setattr(board, "has_coordination", lambda: True)
    monkeypatch.setattr(board, "news", lambda seconds=0.0: [said.pop(0)] if said else [])
    return said


def test_the_first_process_shows_the_layers_of_all_in_turn(said):
    shown, turns = [], []
    seen = Board(
        "compressing",
        (0, 2, 4, 6),
        lambda *call: shown.append(call),
        in_turn=lambda layer, found: turns.append((layer, found)),
        shared=True,
    )
    said.append(["compressing", 4, "four"])
    seen.working(0.5)  # half of a layer of its own, and one of the other process
    assert shown[-1] == ("compressing", 1.5, 4) and turns == []
    seen.done(0, "zero")
    assert turns == [(0, "zero")]
    said += [["analysing", 6, None], ["compressing", 2, "two"], ["compressing", 6, "six"]]
    seen.wait()
    assert turns == [(0, "zero"), (2, "two"), (4, "four"), (6, "six")]
    assert [done for _, done, _ in shown if done == int(done)] == [0, 1, 2, 3, 4]
    seen.complete({})  # nothing is left


def test_what_was_not_heard_is_shown_at_the_end(said):
    turns = []
    seen = Board("compressing", (0, 1), print, in_turn=lambda *turn: turns.append(turn), shared=True)
    seen.done(1, "one")
    seen.complete({0: "zero", 1: "another"})
    assert turns == [(0, "zero"), (1, "one")]


def test_the_other_process_shows_nothing_and_tells(monkeypatch):
    told = []
    monkeypatch.setattr(board.jax, "process_count", lambda: 2)
    monkeypatch.setattr(board, "is_first_process", lambda: False)
    monkeypatch.setattr(board, "tell_first", told.append)
    seen = Board("compressing", (0, 1), pytest.fail, in_turn=pytest.fail, shared=True)
    seen.working(0.5)
    seen.done(1, {"bytes": 3})
    seen.wait()
    seen.complete({0: None, 1: None})
    assert told == [["compressing", 1, {"bytes": 3}]]
