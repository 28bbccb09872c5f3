"""Word problems with their answers, drawn at random: what the demo tunes a language model on, and scores it by."""

import json
import random
from collections.abc import Callable
from pathlib import Path

NAMES = ("Mia", "Noah", "Ada", "Liam", "Zoe", "Omar", "Ivy", "Hugo", "Lena", "Raj")
THINGS = ("apples", "marbles", "stickers", "books", "shells", "pencils", "coins", "cards")


def write_problems(folder: Path, *, train: int, held_out: int, seed: int = 0) -> None:
    """Writes `train.jsonl` and `held-out.jsonl`, so many lines of `{"messages": [...]}`; no problem is in both."""
    draw, seen = random.Random(seed), dict[str, str]()
    while len(seen) < train + held_out:
        question, answer = draw.choice(KINDS)(draw)
        seen.setdefault(question, answer)
    lines = [_conversation(question, answer) for question, answer in seen.items()]
    (folder / "train.jsonl").write_text("".join(lines[:train]), "utf-8")
    (folder / "held-out.jsonl").write_text("".join(lines[train:]), "utf-8")


def _conversation(question: str, answer: str) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}) + "\n"


def _given_away(draw: random.Random) -> tuple[str, str]:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    boxes, each, given = draw.randint(2, 9), draw.randint(3, 12), draw.randint(1, 5)
    has = boxes * each
    return (
        f"{name} has {boxes} boxes with {each} {thing} each and gives {given} {thing} away. How many {thing} are left?",
        f"{name} has {boxes} * {each} = {has} {thing}. After giving {given} away, {has} - {given} = {has - given} are "
        f"left.\n#### {has - given}",
    )


def _shared(draw: random.Random) -> tuple[str, str]:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    friends, each, kept = draw.randint(2, 8), draw.randint(2, 9), draw.randint(1, 9)
    shared = friends * each
    total = shared + kept
    return (
        f"{name} has {total} {thing}, keeps {kept} and shares the others equally among {friends} friends. How many "
        f"{thing} does each friend get?",
        f"{name} shares {total} - {kept} = {shared} {thing}. Each friend gets {shared} / {friends} = {each}.\n"
        f"#### {each}",
    )


def _paid(draw: random.Random) -> tuple[str, str]:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    count, price, paid = draw.randint(2, 9), draw.randint(2, 6), draw.choice((60, 80, 100))
    cost = count * price
    return (
        f"{name} buys {count} {thing} for ${price} each and pays with ${paid}. How much change does {name} get?",
        f"The {thing} cost {count} * {price} = ${cost}. The change is {paid} - {cost} = ${paid - cost}.\n#### "
        f"{paid - cost}",
    )


def _saved(draw: random.Random) -> tuple[str, str]:
    name = draw.choice(NAMES)
    week, weeks, has = draw.randint(2, 9), draw.randint(3, 9), draw.randint(5, 30)
    return (
        f"{name} has ${has} and saves ${week} every week. How much money does {name} have after {weeks} weeks?",
        f"In {weeks} weeks {name} saves {weeks} * {week} = ${weeks * week}. Together that is {has} + {weeks * week} = "
        f"${has + weeks * week}.\n#### {has + weeks * week}",
    )


KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_given_away, _shared, _paid, _saved)
