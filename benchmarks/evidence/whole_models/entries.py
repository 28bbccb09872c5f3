"""Everything that is done to a model, the most telling first."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

from evidence.whole_models.peers import k_quant, llm_compressor
from evidence.whole_models.task import BUILT_IN, Task

WHOLE = "whole"
OURS, LLAMA_CPP, LLM_COMPRESSOR = "ours", "llama.cpp", "llm-compressor"
KINDS = ("Q4_K_M", "Q3_K_M", "Q2_K")
GPTQ, AWQ = "GPTQ W4A16", "AWQ W4A16"
BUDGETS = (3.0, 4.0, 2.5, 2.0, 5.0, 1.5)
TRIES = 3
_BY_IMPORTANCE = ", imatrix"


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
    """

    label: str
    whose: str
    make: Callable[[Task, Path, int, int], str]
    calibrated: bool = True
    beside: str | None = None


def compress(task: Task, target: Path, draw: int, room: int, *, options: tuple[object, ...], text: str | None) -> str:
    """`moe-jax compress --of model`; without a text by `""`, with the one to calibrate with by None."""
    calibration = [] if text == "" else task.calibrated(draw, text)
    budget = ["--target-bytes", room] if room else []
    task.command("compress", task.model, target, "--of", "model", *options, *budget, *calibration)
    return ""


def _ours(label: str, *options: object, text: str | None = None, beside: str | None = None) -> Entry:
    make = partial(compress, options=options, text=text)
    return Entry(label=label, whose=OURS, make=make, calibrated=text != "", beside=beside)


def _quantized(bits: int, text: str | None, words: str) -> Entry:
    return _ours(f"{bits} bits, {words}", "--method", "quantize", "--bits", bits, text=text)


def _allocated(beside: str) -> Entry:
    return _ours(f"allocate, bytes of {beside}", "--method", "allocate", beside=beside)


def _with_budget(bits: float) -> Entry:
    return _ours(f"allocate, {bits:g} bits", "--method", "allocate", "--budget-bits", bits)


def _tried(beside: str) -> Entry:
    label = f"allocate, {TRIES} tries, bytes of {beside}"
    return _ours(label, "--method", "allocate", "--tries", TRIES, beside=beside)


def _k_quant(kind: str, *, imatrix: bool) -> Entry:
    def make(task: Task, target: Path, draw: int, room: int) -> str:
        del room
        return k_quant(task, target, kind, draw=draw if imatrix else None)

    label = kind + _BY_IMPORTANCE if imatrix else kind
    return Entry(label=label, whose=LLAMA_CPP, make=make, calibrated=imatrix)


def _llm_compressor(label: str, method: str) -> Entry:
    def make(task: Task, target: Path, draw: int, room: int) -> str:
        del room
        return llm_compressor(task, target, method, draw=draw)

    return Entry(label=label, whose=LLM_COMPRESSOR, make=make)


ENTRIES = (
    *(_k_quant(kind, imatrix=False) for kind in KINDS),
    _quantized(4, None, "calibrated"),
    *(_allocated(kind) for kind in KINDS),
    _llm_compressor(GPTQ, "gptq"),
    _allocated(GPTQ),
    *(_k_quant(kind, imatrix=True) for kind in KINDS),
    _llm_compressor(AWQ, "awq"),
    _allocated(AWQ),
    _quantized(3, None, "calibrated"),
    _quantized(2, None, "calibrated"),
    *(_quantized(bits, "", "rounded") for bits in (4, 3, 2)),
    _with_budget(BUDGETS[0]),
    _tried(KINDS[0]),
    *(_quantized(bits, BUILT_IN, "calibrated with the built-in texts") for bits in (4, 3, 2)),
    *(_with_budget(bits) for bits in BUDGETS[1:]),
    *(_tried(kind) for kind in KINDS[1:]),
)
BY_LABEL = {entry.label: entry for entry in ENTRIES}
PEERS = tuple(entry for entry in ENTRIES if entry.whose != OURS)


def size_of(peer: Entry) -> str:
    """The label of the entry that has the same bytes: an importance matrix does not change them."""
    return peer.label.removesuffix(_BY_IMPORTANCE)
