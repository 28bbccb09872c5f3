"""Passages of a text whose last word is to be guessed, for the task `last_word_local`: in the manner of LAMBADA.

    python examples/last_words.py wiki.test.raw eval-data/last_words/test.jsonl [--count 1000]
    moe-jax eval MODEL --tasks last_word_local --data-dir eval-data

A passage ends with a word that occurs in it before, as most of LAMBADA's do: who knows the context can guess it.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

WORD = re.compile(r"[A-Za-z]{4,}")
FEWEST_WORDS, MOST_WORDS = 40, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("text", type=Path, help="a text file: a paragraph a line, as WikiText is")
    parser.add_argument("out", type=Path, help="JSON lines; must not exist")
    parser.add_argument("--count", type=int, default=1000, help="of passages, at most")
    options = parser.parse_args()
    lines = options.text.read_text(encoding="utf-8").splitlines()
    passages = [passage for line in lines if not line.strip().startswith("=") for passage in last_words(line)]
    if not passages:
        raise SystemExit(f"{options.text} has no passage that ends with a word it had before")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("x", encoding="utf-8") as file:
        for passage in passages[: options.count]:
            file.write(json.dumps({"text": passage}, ensure_ascii=False) + "\n")


def last_words(paragraph: str) -> Iterator[str]:
    """Passages of a paragraph, one after the other: words joined by blanks, the last of which is also further ahead."""
    words: list[str] = []
    for word in paragraph.split():
        words.append(word)
        repeated = WORD.fullmatch(word) and word.lower() in {one.lower() for one in words[:-1]}
        if len(words) >= FEWEST_WORDS and repeated:
            yield " ".join(words)
            words = []
        elif len(words) >= MOST_WORDS:
            words = []


if __name__ == "__main__":
    main()
