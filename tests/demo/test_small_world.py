"""The small world: answers read from the pixels by another way, chance, and the files."""

import json
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage
from scipy.spatial import ConvexHull

from moe_jax.core.errors import InputError
from moe_jax.demo import small_world
from moe_jax.demo.small_world import CHANCE, COLOURS, NUMBERS, SHAPES, asked_scenes, main, training_scenes, write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "world"
    write_world(folder, seed=3, train=50, test=60)
    return folder


def lines(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def contents(folder):
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in sorted(folder.rglob("*.*"))}


def seen(file):
    """The things in a picture, of its pixels: colour, shape, reach, and centre."""
    pixels, found = np.asarray(Image.open(file)), []
    for name, colour in COLOURS.items():
        parts, count = ndimage.label(np.all(pixels == colour, axis=-1), np.ones((3, 3)))
        for part in range(1, count + 1):
            points = np.argwhere(parts == part)
            hull = ConvexHull(points)
            reach = np.hypot(*(points - points.mean(axis=0)).T).max()
            # A star fills half of its hull; the others fill theirs, and so much of the circle around them.
            filled = hull.volume / (np.pi * reach**2)
            shape = "circle" if filled > 0.8 else "square" if filled > 0.5 else "triangle"
            shape = "star" if len(points) < 0.75 * hull.volume else shape
            found.append((name, shape, reach, points.mean(axis=0)))
    return found


def answered(question, things):
    """The answer to a question, by what is seen."""
    of_colour = {colour: (shape, reach, centre) for colour, shape, reach, centre in things}
    if found := re.fullmatch(r"Which (colour|shape) do you see\?", question):
        (answer,) = {thing[found[1] == "shape"] for thing in things}
        return answer
    if found := re.fullmatch(r"Is the (\w+) shape (left|top) or (right|bottom)\?", question):
        centre = of_colour[found[1]][2][int(found[2] == "left")]
        return found[2] if centre < small_world.SIDE / 2 else found[3]
    if found := re.fullmatch(r"Which is larger, (\w+) or (\w+)\?", question):
        return max(found[1], found[2], key=lambda colour: of_colour[colour][1])
    assert question == "How many shapes are there?"
    return NUMBERS[len(things) - 1]


@pytest.mark.parametrize("name", ["train", "test"])
def test_answers_are_those_of_the_pixels(world, name):
    asked = Counter()
    for line in lines(world, name):
        things, turns = seen(world / line["image"]), line["conversations"]
        for kind, human, gpt in zip(line["kinds"], turns[::2], turns[1::2], strict=True):
            assert (human["from"], gpt["from"]) == ("human", "gpt")
            assert gpt["value"] == answered(human["value"].removeprefix("<image>\n"), things), line
            asked[kind] += 1
    assert asked.keys() == CHANCE.keys()


def test_captions_are_those_of_the_pixels(world):
    for line in lines(world, "captions"):
        things = seen(world / line["image"])
        human, gpt = (turn["value"] for turn in line["conversations"])
        assert human == "<image>\nDescribe the picture."
        said = Counter()
        for one in gpt.split(" and "):
            number, *size, colour, shape = one.split()
            count = 1 if number == "a" else 1 + NUMBERS.index(number)
            said[(colour, shape.removesuffix("s"), *size)] += count
        told = [("large" if reach > 18 else "small",) if " and " in gpt else () for _, _, reach, _ in things]
        assert said == Counter((thing[0], thing[1], *size) for thing, size in zip(things, told, strict=True))


def test_a_picture_is_named_once_in_every_conversation_and_is_there(world):
    for name, count in (("train", 50), ("test", 60), ("captions", 50)):
        found = lines(world, name)
        assert len(found) == len({line["id"] for line in found}) == count
        for line in found:
            values = [turn["value"] for turn in line["conversations"]]
            assert values[0].startswith("<image>\n") and "<image>" not in "".join(values[1:])
            assert Image.open(world / line["image"]).size == (224, 224)


def test_answers_are_equally_frequent():
    unseen = Counter((one.kind, one.answer) for _, asked in asked_scenes(0, 600) for one in asked)
    assert Counter(kind for kind, _ in unseen.elements()) == dict.fromkeys(CHANCE, 120)
    for kind, share in CHANCE.items():
        answers = [count for (of, _), count in unseen.items() if of == kind]
        # Those of `position` are two for each of the two axes; `comparison` names two colours of six.
        number = {"position": 4, "comparison": len(COLOURS)}.get(kind, round(1 / share))
        assert len(answers) == number and min(answers) == max(answers) == 120 / number
    learnt = Counter((one.kind, one.answer) for _, asked in training_scenes(0, 2400) for one in asked)
    for kind in CHANCE:
        answers = np.array([count for (of, _), count in learnt.items() if of == kind])
        assert np.abs(answers / answers.mean() - 1).max() < 0.25, (kind, answers)


def test_one_who_does_not_see_gains_nothing_from_the_words_of_comparisons():
    said = [re.findall(r"\w+", one.text)[-3::2] + [one.answer] for _, asked in training_scenes(1, 1000)
            for one in asked if one.kind == "comparison"]  # fmt: skip
    assert abs(np.mean([first == answer for first, _, answer in said]) - 0.5) < 0.06


def test_the_same_seed_draws_the_same_files_and_another_one_shares_no_picture(world, tmp_path):
    write_world(tmp_path / "same", seed=3, train=50, test=60)
    write_world(tmp_path / "other", seed=4, train=20, test=20)
    mine, other = contents(world), contents(tmp_path / "other")
    assert contents(tmp_path / "same") == mine
    drawn = [data for found in (mine, other) for name, data in found.items() if name.endswith(".png")]
    assert len(set(drawn)) == len(drawn) == 150


def test_the_first_pictures_do_not_depend_on_their_number(world, tmp_path):
    write_world(tmp_path / "fewer", seed=3, train=5, test=7)
    for name, count in (("train", 5), ("test", 7), ("captions", 5)):
        assert lines(tmp_path / "fewer", name) == lines(world, name)[:count]


@pytest.mark.parametrize("options", [{"train": -1}, {"test": 10**7}, {"seed": -1}, {"train": 2.5}, {"seed": True}])
def test_bad_numbers_are_refused(tmp_path, options):
    (name,) = options
    with pytest.raises(InputError, match=f"{name} = "):
        write_world(tmp_path / "world", **options)
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_world_once(tmp_path, capsys):
    main([str(tmp_path / "world"), "--train", "3", "--test", "2", "--seed", "9"])
    assert "shape 25%" in capsys.readouterr().out and len(lines(tmp_path / "world", "test")) == 2
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "world")])
    assert ended.value.code == 2
    assert "already exists" in capsys.readouterr().err
    assert len(SHAPES) == 4 and len(lines(tmp_path / "world", "train")) == 3
