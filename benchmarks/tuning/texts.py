"""The texts: what a base is trained on, and the domains that it is tuned to, each with parts that are held out."""

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from quality.text import split_text

# Characters of a held-out source file that are scored, from its middle: the beginning is licence and imports.
_FILE_STRETCH = 8_000


class Text(NamedTuple):
    """Attributes:
    train: file of the text to train on.
    held_out: text to score.
    validation: text to choose learning rates with.
    """

    train: Path
    held_out: str
    validation: str


def shakespeare(data: Path, work: Path) -> Text:
    """TinyShakespeare; its last tenth is held out."""
    train, held_out = split_text(data, work, 0.1)
    return Text(train, *_halves(held_out.read_text()))


def code(data: Path, work: Path) -> Text:
    """The standard library of the Python that runs this: its top-level modules, two of every ten held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    train = [text for index, text in enumerate(texts) if index % 10 not in (0, 5)]

    def stretches(first: int) -> str:
        return "\n".join(text[len(text) // 2 :][:_FILE_STRETCH] for text in texts[first::10])

    return Text(_written(work / "code.txt", "\n".join(train)), stretches(0), stretches(5))


def math(data: Path, work: Path) -> Text:
    """GSM8K's questions with their answers; its test set is held out."""
    train, test = (
        "\n".join(f"Question: {line['question']}\nAnswer: {line['answer']}\n" for line in _lines(data, name))
        for name in ("train", "test")
    )
    return Text(_written(work / "math.txt", train), *_halves(test))


def wikitext(data: Path, work: Path) -> Text:
    """WikiText-2: its validation set to train on, its test set held out."""
    folder = data / "text" / "wikitext2"
    train, test = ((folder / name).read_text(encoding="utf-8") for name in ("valid.txt", "test.txt"))
    return Text(_written(work / "wikitext.txt", train), *_halves(test))


DOMAINS: dict[str, Callable[[Path, Path], Text]] = {"code": code, "math": math, "wikitext": wikitext}


def base_texts(data: Path, work: Path) -> tuple[Path, ...]:
    """What a base is trained on: files that count alike, whatever their sizes."""
    return (data / "text" / "tinystories" / "tinystories_sample_2MiB.txt", shakespeare(data, work).train)


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def _lines(data: Path, name: str) -> list[dict[str, str]]:
    file = data / "eval" / "gsm8k" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _written(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file
