"""The small Mixtures-of-Experts of the comparison, made by the commands that a user would type."""

import json
from collections.abc import Callable
from pathlib import Path

from evidence.commands import run
from evidence.studies.corpus import RECIPES, byte_pairs, write_whole
from evidence.studies.texts import read_text

TEXTS = ("wiki", "stories", "shakespeare")
STORIES, LLAMA = "stories260K-MoE", "Llama-d256-MoE"
_VOCABULARY = 2048
_RECIPE = """
run_dir = {run}
[model]
{model}
output_dtype = "bfloat16"
[data]
seq_len = 128
piece_kib = 1
{tokenizer}
{sources}
[optimizer]
learning_rate = {rate}
[schedule]
warmup_steps = 50
[train]
steps = {steps}
batch_size = {rows}
[checkpoint]
keep = 1
[log]
every = 100
tensorboard = false
"""


def stories_moe(data: Path, work: Path) -> Path:
    """stories260K with 8 copies of every FFN, top-2, trained on the three texts."""
    up, target = work / "upcycled", work / "run"
    run("upcycle", data / "weights" / "stories260K" / "hf", up, "--experts", 8, "--top-k", 2, "--every", 1)
    return _trained(data, target, f"path = {_quoted(up)}", steps=600, rate=1e-3, rows=16)


def llama_moe(data: Path, work: Path) -> Path:
    """A Llama of 4 layers of d 256, from random weights, upcycled as 4 experts, top-2, and trained again; d and the
    width of its FFNs, 768, are multiples of the blocks of all formats."""
    tokenizer = work / "tokenizer" / "tokenizer.json"
    tokenizer.parent.mkdir(parents=True, exist_ok=True)
    write_whole(tokenizer, byte_pairs(TEXTS, data, _VOCABULARY).to_str())
    begun = f'config = {_quoted(RECIPES / "small_llama.json")}\ninit = "random"'
    how = f"tokenizer = {_quoted(tokenizer)}"
    dense = _trained(data, work / "dense", begun, steps=300, rate=3e-3, rows=16, tokenizer=how)
    up = work / "upcycled"
    run("upcycle", dense, up, "--experts", 4, "--top-k", 2, "--every", 1)
    return _trained(data, work / "run", f"path = {_quoted(up)}", steps=200, rate=1e-3, rows=8)


MADE: dict[str, Callable[[Path, Path], Path]] = {STORIES: stories_moe, LLAMA: llama_moe}
"""What makes a model from the folder of data in a folder of its own, by its name."""


def _trained(data: Path, target: Path, model: str, *, steps: int, rate: float, rows: int, tokenizer: str = "") -> Path:
    folder = target.parent / "texts"
    folder.mkdir(parents=True, exist_ok=True)
    for name in TEXTS:
        write_whole(folder / f"{name}.txt", read_text(name, data).train)
    recipe = target.with_suffix(".toml")
    sources = "\n".join(f"[[data.sources]]\npath = {_quoted(folder / f'{name}.txt')}" for name in TEXTS)
    write_whole(
        recipe,
        _RECIPE.format(
            run=_quoted(target),
            model=model,
            tokenizer=tokenizer,
            sources=sources,
            rate=rate,
            steps=steps,
            rows=rows,
        ),
    )
    run("train", recipe)
    return target / "model"


def _quoted(path: Path) -> str:
    return json.dumps(str(path))
