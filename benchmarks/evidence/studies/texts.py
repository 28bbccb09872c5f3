"""The texts: three domains, each with a part to train on, one to choose with, and one that is reported."""

import hashlib
import json
import sysconfig
from pathlib import Path
from typing import NamedTuple

# Characters of a held-out source file that are scored, from its middle: the beginning is licence and imports.
_FILE_STRETCH = 8_000


class Text(NamedTuple):
    """Attributes:
    train: to train on.
    selection: to choose rates and variants with.
    test: what is reported; nothing is chosen on it.
    """

    train: str
    selection: str
    test: str


def read_text(name: str, data: Path) -> Text:
    """One of `TEXTS`.

    Args:
      name: of the text.
      data: the folder that `claims.py` describes.

    Raises:
      FileNotFoundError: if a file of the text is not there.
    """
    return TEXTS[name](data)


def fingerprint(text: Text) -> dict[str, str]:
    """SHA-256 of every part; the code is that of the Python at hand, so that machines may differ."""
    return {part: hashlib.sha256(whole.encode()).hexdigest() for part, whole in text._asdict().items()}


def _code(data: Path) -> Text:
    """The standard library of the Python that runs this: its top-level modules, two of every ten held out."""
    del data
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]

    def stretches(first: int) -> str:
        return "\n".join(text[len(text) // 2 :][:_FILE_STRETCH] for text in texts[first::10])

    train = "\n".join(text for index, text in enumerate(texts) if index % 10 not in (0, 5))
    return Text(train, stretches(5), stretches(0))


def _math(data: Path) -> Text:
    """GSM8K's questions with their answers; of its test set one half is for selection."""
    train, test = (
        "\n".join(f"Question: {line['question']}\nAnswer: {line['answer']}\n" for line in _lines(data, name))
        for name in ("train", "test")
    )
    return Text(train, *_halves(test))


def _wiki(data: Path) -> Text:
    """WikiText-2: its validation set to train on; of its test set one half is for selection."""
    folder = data / "text" / "wikitext2"
    train, test = ((folder / name).read_text(encoding="utf-8") for name in ("valid.txt", "test.txt"))
    return Text(train, *_halves(test))


def _shakespeare(data: Path) -> Text:
    """TinyShakespeare, whose last tenth is held out."""
    text = (data / "text" / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    return Text(text[:cut], *_halves(text[cut:]))


def _stories(data: Path) -> Text:
    """TinyStories, whose last tenth is held out."""
    file = data / "text" / "tinystories" / "tinystories_sample_2MiB.txt"
    text = file.read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    return Text(text[:cut], *_halves(text[cut:]))


TEXTS = {"code": _code, "math": _math, "wiki": _wiki, "shakespeare": _shakespeare, "stories": _stories}
# What models are trained on and reported for, and what an MoE knows before it is tuned to these.
DOMAINS = ("code", "math", "wiki")
EARLIER = ("stories", "shakespeare")
MIXTURES = {"domains": DOMAINS, "earlier": EARLIER, **{name: (name,) for name in TEXTS}}


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def _lines(data: Path, name: str) -> list[dict[str, str]]:
    file = data / "eval" / "gsm8k" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
