"""A small world: pictures of coloured shapes, with captions, and questions whose answers are known.

    python -m moe_jax.demo.small_world world --seed 0 --train 2000 --test 200

It shows in minutes of training whether a model looks: of every kind of question it is known how many answers are right
by chance. All is drawn from the seed: the same numbers give the same files.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from moe_jax.core.errors import InputError, printable, shown
from moe_jax.files.staging import check_target, staged_directory
from moe_jax.files.storage_path import as_path

_SUMMARY = "Draws a small world: pictures of coloured shapes, with captions, and questions whose answers are known."

SIDE = 224
"""Pixels of a side of a picture."""
COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (245, 220, 40),
    "black": (10, 10, 10),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "star")
NUMBERS = ("one", "two", "three", "four", "five")
CHANCE = {
    "colour": 1 / len(COLOURS),
    "shape": 1 / len(SHAPES),
    "count": 1 / len(NUMBERS),
    "position": 1 / 2,
    "comparison": 1 / 2,
}
"""Kinds of questions, and the share of right answers of one who does not see: all answers are equally frequent, and
questions of the last two kinds name two."""
DESCRIBE = "Describe the picture."
_ANSWER = "{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
TEMPLATES = {
    "captions": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<image>' }}{% else %}" + _ANSWER,
    "train": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ m.content if loop.first else '\\n' + m.content }}{% else %}" + _ANSWER,
}
"""Chat templates that cost few tokens, by the name of the file: a picture and its caption; and questions and answers
one after another, each on a line. Before all is BOS: language models attend to the first token of a text whatever it
is, and a picture in its place is hardly seen."""
MAX_PICTURES = 1_000_000

_ACROSS, _DOWN = ("left", "right"), ("top", "bottom")
_SIZES = ("small", "large")
_RADII = {"small": 14, "large": 27}
# No shape is neither left nor right: so many pixels are between the middle and its centre. Others lie between shapes.
_FROM_MIDDLE, _APART = 12, 6
# Largest differences of the pixels of a background from its colour.
_NOISE = (0, 0, 8, 20)
# Draws are apart by these, and pictures by their numbers.
_TRAIN, _TEST = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thing:
    """A shape in a picture.

    Attributes:
      shape: one of `SHAPES`.
      colour: one of `COLOURS`.
      size: `small` or `large`.
      x, y: its centre, in pixels from the left and from the top.
      angle: in degrees, by which it is turned.
    """

    shape: str
    colour: str
    size: str
    x: int
    y: int
    angle: float

    @property
    def across(self) -> str:
        """`left` or `right`."""
        return _ACROSS[self.x > SIDE / 2]

    @property
    def down(self) -> str:
        """`top` or `bottom`."""
        return _DOWN[self.y > SIDE / 2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """The content of a picture.

    Attributes:
      things: one to five that are alike but for their sizes, or two of unlike shapes, colours and sizes, in the order
        of the caption.
      background: its colour.
      noise: largest difference of its pixels from that.
      seed: of the noise.
    """

    things: tuple[Thing, ...]
    background: tuple[int, ...]
    noise: int
    seed: int


class Question(NamedTuple):
    """A question on a picture.

    Attributes:
      kind: one of `CHANCE`, or `caption`.
      text: the question.
      answer: a word, or the caption.
    """

    kind: str
    text: str
    answer: str


def draw_alike(rng: np.random.Generator, count: int) -> Scene:
    """Draws the content of a picture of so many shapes, 1 to 5, that are all of one colour and of one kind."""
    colour, shape = str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES))
    return _scene([(shape, colour, str(size)) for size in rng.choice(_SIZES, count)], rng)


def draw_pair(rng: np.random.Generator) -> Scene:
    """Draws the content of a picture of two shapes of unlike kinds, colours and sizes."""
    shapes, colours, sizes = rng.permutation(SHAPES), rng.permutation(list(COLOURS)), rng.permutation(_SIZES)
    return _scene([(str(shapes[i]), str(colours[i]), str(sizes[i])) for i in range(2)], rng)


def _scene(kinds: Sequence[tuple[str, str, str]], rng: np.random.Generator) -> Scene:
    """Draws places for things of which shape, colour and size are known, and a background."""
    places = _places([_RADII[size] for _, _, size in kinds], rng)
    things = [
        Thing(shape=shape, colour=colour, size=size, x=x, y=y, angle=float(rng.uniform(-15, 15)))
        for (shape, colour, size), (x, y) in zip(kinds, places, strict=True)
    ]
    things.sort(key=lambda thing: (_DOWN.index(thing.down), _ACROSS.index(thing.across), thing.x))
    background = tuple(int(value) for value in rng.integers(110, 170) + rng.integers(-18, 19, 3))
    return Scene(
        things=tuple(things), background=background, noise=int(rng.choice(_NOISE)), seed=int(rng.integers(2**31))
    )


def _places(radii: Sequence[int], rng: np.random.Generator) -> list[tuple[int, int]]:
    """Draws centres of circles of these radii that lie apart from each other and from the edges."""
    while True:
        found: list[tuple[int, int]] = []
        for radius in radii:
            for _ in range(20):
                x, y = (int(value) for value in rng.integers(radius + 2, SIDE - radius - 2, 2))
                off_middle = min(abs(x - SIDE / 2), abs(y - SIDE / 2)) >= _FROM_MIDDLE
                pairs = zip(found, radii, strict=False)
                if off_middle and all(np.hypot(x - u, y - v) >= radius + r + _APART for (u, v), r in pairs):
                    found.append((x, y))
                    break
        if len(found) == len(radii):
            return found


def paint(scene: Scene) -> UInt8[np.ndarray, "224 224 3"]:
    """Returns the pixels of a picture; those of shapes have exactly their colours, and those of no other thing have."""
    noise = np.random.default_rng(scene.seed).integers(-scene.noise, scene.noise + 1, (SIDE, SIDE, 1))
    picture = Image.fromarray((np.array(scene.background) + noise).astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    for thing in scene.things:
        colour, radius = COLOURS[thing.colour], _RADII[thing.size]
        if thing.shape == "circle":
            draw.ellipse((thing.x - radius, thing.y - radius, thing.x + radius, thing.y + radius), fill=colour)
        else:
            draw.polygon(_corners(thing, radius), fill=colour)
    return np.asarray(picture)


def _corners(thing: Thing, radius: int) -> list[tuple[float, float]]:
    """Returns the corners of a square, triangle or star."""
    number, first = {"square": (4, 45), "triangle": (3, -90), "star": (10, -90)}[thing.shape]
    angles = np.radians(first + thing.angle + 360 / number * np.arange(number))
    radii = np.where((np.arange(number) % 2 == 1) & (thing.shape == "star"), 0.42, 1.0) * radius
    corners = np.stack([thing.x + radii * np.cos(angles), thing.y + radii * np.sin(angles)], axis=1)
    return [(x, y) for x, y in corners.tolist()]


def caption(scene: Scene) -> str:
    """Returns the description of a picture, from the top left to the bottom right.

    >>> import numpy as np; from moe_jax.demo.small_world import caption, draw_alike
    >>> caption(draw_alike(np.random.default_rng(0), 3))
    'three white triangles'
    """
    first, *others = scene.things
    if _is_alike(scene):
        return f"{NUMBERS[len(others)]} {first.colour} {first.shape}{'s' if others else ''}"
    return " and ".join(f"a {one.size} {one.colour} {one.shape}" for one in scene.things)


def _is_alike(scene: Scene) -> bool:
    return len({(thing.shape, thing.colour) for thing in scene.things}) == 1


def ask(scene: Scene, rng: np.random.Generator) -> list[Question]:
    """Draws one question of each kind that a picture has answers to, in the order of `CHANCE`.

    Of shapes that are alike, these are colour, shape and count, of others position and comparison.
    """
    one = scene.things[int(rng.integers(len(scene.things)))]
    if _is_alike(scene):
        return [
            Question(kind="colour", text="Which colour do you see?", answer=one.colour),
            Question(kind="shape", text="Which shape do you see?", answer=one.shape),
            Question(kind="count", text="How many shapes are there?", answer=NUMBERS[len(scene.things) - 1]),
        ]
    names, answer = (_ACROSS, one.across) if rng.integers(2) else (_DOWN, one.down)
    large = next(thing for thing in scene.things if thing.size == "large")
    first, second = rng.permutation([thing.colour for thing in scene.things])
    return [
        Question(kind="position", text=f"Is the {one.colour} shape {' or '.join(names)}?", answer=answer),
        Question(kind="comparison", text=f"Which is larger, {first} or {second}?", answer=large.colour),
    ]


_ANSWERS = {
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "count": NUMBERS,
    "position": (*_ACROSS, *_DOWN),
    "comparison": tuple(COLOURS),
}


def training_scenes(seed: int, number: int) -> Iterator[tuple[Scene, list[Question]]]:
    """Draws pictures to learn from, each with its questions in any order; every third one is of two unlike shapes."""
    for index in range(number):
        rng = np.random.default_rng((seed, _TRAIN, index))
        scene = draw_pair(rng) if index % 3 == 2 else draw_alike(rng, int(rng.integers(1, len(NUMBERS) + 1)))
        asked = ask(scene, rng)
        yield scene, [asked[at] for at in rng.permutation(len(asked))]


def asked_scenes(seed: int, number: int) -> Iterator[tuple[Scene, list[Question]]]:
    """Draws pictures to be asked about, each with one question: kinds in turn, and in each all answers in turn."""
    for index in range(number):
        rng = np.random.default_rng((seed, _TEST, index))
        kind = tuple(CHANCE)[index % len(CHANCE)]
        wanted = _ANSWERS[kind][index // len(CHANCE) % len(_ANSWERS[kind])]
        while True:
            is_pair = kind in ("position", "comparison")
            scene = draw_pair(rng) if is_pair else draw_alike(rng, int(rng.integers(1, len(NUMBERS) + 1)))
            found = [one for one in ask(scene, rng) if (one.kind, one.answer) == (kind, wanted)]
            if found:
                yield scene, found
                break


def write_world(out: Path | str, *, seed: int = 0, train: int = 2000, test: int = 200) -> None:
    """Writes pictures and three files of conversations in LLaVA's form, one in a line, with paths from `out` on.

    `captions.jsonl` describes the pictures to learn from, and `train.jsonl` asks about them, two or three questions in
    a conversation; `test.jsonl` asks one question about each of other pictures. `kinds` are those of the questions.

    Args:
      out: the folder, which must not exist; it appears whole or not at all.
      seed: of all that is drawn.
      train: number of pictures to learn from.
      test: number of pictures to be asked about.

    Raises:
      InputError: if there is something at `out`, or for numbers that are none of pictures or seeds.
    """
    for name, value in (("train", train), ("test", test), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PICTURES:
            raise InputError(f"{name} = {shown(value)}: expected a number from 0 to {MAX_PICTURES:,}")
    out = as_path(out)
    check_target(out)
    with staged_directory(out) as folder, ThreadPoolExecutor() as pool:
        learnt, asked = training_scenes(seed, train), asked_scenes(seed, test)
        captions, questions = [], []
        for place, scene, turns in _painted(folder / "train", learnt, pool):
            captions.append(_line(place, [Question(kind="caption", text=DESCRIBE, answer=caption(scene))]))
            questions.append(_line(place, turns))
        unseen = [_line(place, turns) for place, _, turns in _painted(folder / "test", asked, pool)]
        for name, lines in (("captions", captions), ("train", questions), ("test", unseen)):
            (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")


def _painted(
    folder: Path, scenes: Iterable[tuple[Scene, list[Question]]], pool: Executor
) -> Iterator[tuple[str, Scene, list[Question]]]:
    """Paints pictures into a folder, and yields the path of each from the folder above."""
    folder.mkdir()
    saved = []
    for index, (scene, questions) in enumerate(scenes):
        file = folder / f"{index:06}.png"
        saved.append(
            pool.submit(lambda scene, file: Image.fromarray(paint(scene)).save(file, compress_level=1), scene, file)
        )
        yield f"{folder.name}/{file.name}", scene, questions
    for one in saved:
        one.result()


def _line(place: str, questions: Sequence[Question]) -> str:
    turns = [
        {"from": who, "value": text} for one in questions for who, text in (("human", one.text), ("gpt", one.answer))
    ]
    turns[0]["value"] = f"<image>\n{turns[0]['value']}"
    name = place.removesuffix(".png").replace("/", "-")
    kinds = [one.kind for one in questions]
    return json.dumps({"id": name, "image": place, "conversations": turns, "kinds": kinds})


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command of the module, with arguments of its own or those of the process."""
    parser = argparse.ArgumentParser(prog="python -m moe_jax.demo.small_world", description=_SUMMARY)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder that appears")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default 0)")
    parser.add_argument("--train", type=int, default=2000, metavar="N", help="pictures to learn from (default 2000)")
    parser.add_argument("--test", type=int, default=200, metavar="N", help="pictures to be asked about (default 200)")
    options = parser.parse_args(arguments)
    try:
        write_world(options.out, seed=options.seed, train=options.train, test=options.test)
    except (InputError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"wrote {options.out}: {options.train:,} pictures to learn from, {options.test:,} to be asked about")
    print("right by chance: " + ", ".join(f"{kind} {share:.0%}" for kind, share in CHANCE.items()))


if __name__ == "__main__":
    main()
