"""Tokens per second of training data: batches made of files and of tokens, and tokenising with 1 and 2 processes.

    python benchmarks/data_pipeline.py MODEL TEXT QUESTIONS [--rounds 3] [--out benchmarks/results]

MODEL has the tokenizer and the chat template, such as SmolLM2-135M-Instruct. TEXT is a text file, QUESTIONS are JSON
lines of {"question", "answer"}, such as GSM8K's. Both are repeated until they have 8 MB. They are read as text, as
JSON lines and parquet of texts, and as conversations, by the iterator over batches that `moe-jax train` reads (8 x 512
tokens, 2 batches ahead), from their own files and from those of `moe-jax data tokenize`, after one pass that fills the
cache. `tokenize` counts the start of its processes. Medians of the rounds, which take turns. OUT receives
`data_pipeline.json`.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pyarrow
import pyarrow.parquet

from evidence.layouts import DATA_PIPELINE
from evidence.results import RESULTS, Figures
from moe_jax.api.open_source import open_source
from moe_jax.data.pipeline import open_data
from moe_jax.data.sections import DataSection, FieldsSection, SourceSection
from moe_jax.data.tokenize_sources import Task, source_patterns, tokenize, totals
from moe_jax.data.tokenizer import find_tokenizer

BYTES = 8_000_000
BATCH, LENGTH = 8, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    figures = Figures("data_pipeline", options.out, writes=True)
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name  # of parquet
        folder = Path(name)
        figures.put_rows(DATA_PIPELINE.name, measure(options, folder))
    print(DATA_PIPELINE.text(figures))


def sources(options: argparse.Namespace, folder: Path) -> dict[str, SourceSection]:
    """The data in every form."""
    text = options.text.read_text(encoding="utf-8")
    text *= -(-BYTES // len(text.encode()))
    stories = [{"text": part} for part in text.split("\n\n") if part.strip()]
    questions = options.questions.read_text(encoding="utf-8").splitlines(keepends=True)
    questions *= -(-BYTES // sum(len(line.encode()) for line in questions))
    (folder / "a.txt").write_text(text, encoding="utf-8")
    (folder / "a.jsonl").write_text("".join(json.dumps(story) + "\n" for story in stories), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(stories), folder / "a.parquet")
    (folder / "b.jsonl").write_text("".join(questions), encoding="utf-8")
    fields = FieldsSection(prompt="question", response="answer")
    return {
        "text": SourceSection(path=str(folder / "a.txt")),
        "JSON lines": SourceSection(path=str(folder / "a.jsonl")),
        "parquet": SourceSection(path=str(folder / "a.parquet")),
        "conversations": SourceSection(path=str(folder / "b.jsonl"), fields=fields, chat=True),
    }


def measure(options: argparse.Namespace, folder: Path) -> list[list[object]]:
    """The rows of the table."""
    model = open_source(options.model)
    tokenizer = find_tokenizer(model.tokenizer_files, model.path)
    rows: list[list[object]] = []
    for name, source in sources(options, folder).items():
        section = DataSection(sources=(source,), seq_len=LENGTH, epochs=1)
        task = Task(section, model.config, tokenizer, BATCH)
        out = folder / "tokens"
        tokens = totals(tokenize(task, folder / "kept"))[0]["tokens"]
        again = DataSection(
            sources=(SourceSection(path=source_patterns(folder / "kept", section)[0]),), seq_len=LENGTH, epochs=1
        )
        ways = (
            partial(read, task),
            partial(read, task._replace(section=again)),
            partial(tokenize_into, out, task, 1),
            partial(tokenize_into, out, task, 2),
        )
        times = [[timed(way) for way in ways] for _ in range(options.rounds)]
        rows.append([name, tokens, *(tokens / statistics.median(column) for column in zip(*times, strict=True))])
        shutil.rmtree(folder / "kept")
        print(*rows[-1], flush=True)
    return rows


def read(task: Task) -> None:
    """All batches of one epoch."""
    given = {"seed": 0, "batch_size": BATCH, "rows": range(BATCH)}
    with contextlib.closing(open_data(task.section, task.config, task.tokenizer_path, **given)) as batches:
        while next(batches)["segment_ids"].any():
            pass


def tokenize_into(out: Path, task: Task, processes: int) -> None:
    tokenize(task, out, processes=processes)
    shutil.rmtree(out)


def timed(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
