"""Everything that is done to a model, the most telling first."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from evidence.whole_models.peers import k_quant, llm_compressor
from evidence.whole_models.task import BUILT_IN, SELF, Task

WHOLE = "whole"
OURS, LLAMA_CPP, LLM_COMPRESSOR = "ours", "llama.cpp", "llm-compressor"
KINDS = ("Q4_K_M", "Q3_K_M", "Q2_K")
GPTQ, AWQ = "GPTQ W4A16", "AWQ W4A16"
BUDGETS = (3.0, 4.0, 2.5, 2.0, 5.0, 1.5)
TRIES = 3
UNIFORM = 3  # bits, of the entries that show what every step is worth
RECOVER_STEPS = 60
ASKED = ("Q4_K_M", GPTQ, "Q2_K")
"""The peers that answer questions, and so does what is allocated within their bytes."""
_BY_IMPORTANCE = ", imatrix"
_TRIED, _TRY = f"{TRIES} tries", ("--tries", TRIES)
_RECOVER = ("--recover-steps", RECOVER_STEPS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One way to make a model smaller.

    Attributes:
      label: its name in the results.
      whose: `OURS`, `LLAMA_CPP` or `LLM_COMPRESSOR`.
      make: writes a model of this task with a draw of what it is calibrated with, within so many bytes if it stands
        `beside` something; returns a note.
      calibrated: whether draws differ.
      beside: the label of the entry whose bytes it has at most; None: its size is its own.
      without: the label of the entry that lacks one step of this one, if any.
      asked: whether it answers questions too.
      only_step: whether it is there only to show what one step is worth.
    """

    label: str
    whose: str
    make: Callable[[Task, Path, int, int], str]
    calibrated: bool = True
    beside: str | None = None
    without: str | None = None
    asked: bool = False
    only_step: bool = False


def compress(task: Task, target: Path, draw: int, room: int, *, options: tuple[object, ...], text: str | None) -> str:
    """`moe-jax compress --of model`; without a text by `""`, with the one to calibrate with by None."""
    calibration = [] if text == "" else task.calibrated(draw, text)
    budget = ["--target-bytes", room] if room else []
    task.command("compress", task.model, target, "--of", "model", *options, *budget, *calibration)
    return ""


def _ours(label: str, *options: object, text: str | None = None, **more: Any) -> Entry:
    make = partial(compress, options=options, text=text)
    return Entry(label=label, whose=OURS, make=make, calibrated=text != "", **more)


def _rounded(bits: int) -> Entry:
    return _ours(f"{bits} bits, rounded", *_codes(bits), text="")


def _calibrated(bits: int) -> Entry:
    return _ours(f"{bits} bits, calibrated", *_codes(bits), without=f"{bits} bits, rounded")


def _calibrated_otherwise(bits: int, text: str, words: str) -> Entry:
    """With other texts than those that stand beside the texts that are scored."""
    label = f"{bits} bits, calibrated with {words}"
    return _ours(label, *_codes(bits), text=text, without=f"{bits} bits, calibrated")


def _step(words: str, *options: object) -> Entry:
    """One option more than codes of `UNIFORM` bits have."""
    without = f"{UNIFORM} bits, calibrated"
    return _ours(f"{without}, {words}", *_codes(UNIFORM), *options, without=without, only_step=True)


def _codes(bits: int) -> tuple[object, ...]:
    return "--method", "quantize", "--bits", bits


def _allocated(beside: str, words: str = "", *options: object, **more: Any) -> Entry:
    label = f"allocate{words and ', '}{words}, bytes of {beside}"
    asked = not words and beside in ASKED
    return _ours(label, "--method", "allocate", *options, beside=beside, asked=asked, **more)


def _allocated_step(words: str, *options: object) -> Entry:
    """One option more than `allocate` within the bytes of codes of `UNIFORM` bits."""
    beside = f"{UNIFORM} bits, calibrated"
    return _allocated(beside, words, *options, without=f"allocate, bytes of {beside}", only_step=True)


def _with_budget(bits: float) -> Entry:
    return _ours(f"allocate, {bits:g} bits", "--method", "allocate", "--budget-bits", bits)


def _tried(beside: str) -> Entry:
    return _allocated(beside, _TRIED, *_TRY)


def _k_quant(kind: str, *, imatrix: bool) -> Entry:
    def make(task: Task, target: Path, draw: int, room: int) -> str:
        del room
        return k_quant(task, target, kind, draw=draw if imatrix else None)

    label = kind + _BY_IMPORTANCE if imatrix else kind
    return Entry(label=label, whose=LLAMA_CPP, make=make, calibrated=imatrix, asked=label in ASKED)


def _llm_compressor(label: str, method: str) -> Entry:
    def make(task: Task, target: Path, draw: int, room: int) -> str:
        del room
        return llm_compressor(task, target, method, draw=draw)

    return Entry(label=label, whose=LLM_COMPRESSOR, make=make, asked=label in ASKED)


ENTRIES = (
    *(_k_quant(kind, imatrix=False) for kind in KINDS),
    _calibrated(4),
    *(_allocated(kind) for kind in KINDS),
    _llm_compressor(GPTQ, "gptq"),
    _allocated(GPTQ),
    *(_k_quant(kind, imatrix=True) for kind in KINDS),
    _llm_compressor(AWQ, "awq"),
    _allocated(AWQ),
    *(_calibrated(bits) for bits in (UNIFORM, 2)),
    *(_rounded(bits) for bits in (UNIFORM, 4, 2)),
    *(_allocated(f"{bits} bits, calibrated", without=f"{bits} bits, calibrated") for bits in (UNIFORM, 4, 2)),
    _step("recovered", *_RECOVER),
    _allocated_step("recovered", *_RECOVER),
    _allocated_step(_TRIED, *_TRY),
    _allocated_step("squared gradients", "--gradients"),
    _step("embedding in 8 bits", "--embedding-bits", 8),
    _ours(
        "4 bits, calibrated, embedding in 4 bits",
        *_codes(4),
        "--embedding-bits",
        4,
        without="4 bits, calibrated",
        only_step=True,
    ),
    _step("rotated", "--rotate"),
    _step("without feedback", "--no-feedback"),
    _step("row scales", "--row-scales"),
    _step("zero points", "--zero-points"),
    _step("fitted levels", "--levels", "fitted"),
    _step("learnt rounding", "--rounding", "learnt"),
    _with_budget(BUDGETS[0]),
    _tried(KINDS[0]),
    *(_calibrated_otherwise(bits, BUILT_IN, "the built-in texts") for bits in (UNIFORM, 4, 2)),
    _calibrated_otherwise(UNIFORM, SELF, "its own texts"),
    *(_with_budget(bits) for bits in BUDGETS[1:]),
    *(_tried(kind) for kind in KINDS[1:]),
)
BY_LABEL = {entry.label: entry for entry in ENTRIES}
PEERS = tuple(entry for entry in ENTRIES if entry.whose != OURS)


def size_of(peer: Entry) -> str:
    """The label of the entry that has the same bytes: an importance matrix does not change them."""
    return peer.label.removesuffix(_BY_IMPORTANCE)
