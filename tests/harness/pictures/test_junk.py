"""Files of questions with anything in place of something end in an error that names it, or are read."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from moe_jax.core.errors import InputError
from moe_jax.harness.documents import read_annotations, read_examples
from moe_jax.harness.pictures.question_set import Answered
from moe_jax.harness.pictures.scoring import SETS
from moe_jax.harness.task_run import known_tasks
from tests.support.picture_questions import write_sets

JUNK = (None, True, 0, -1, 10**30, 1.5, "", " ", "x", "nan", "<image>", [], [None], [[]], {}, {"": {}}, ["x"] * 10)


def places(value, path=()):
    """Paths to everything in a JSON value."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from places(one, (*path, key))


def spoilt(value: Any, rng: random.Random) -> Any:
    """The value with junk in one place, or with something left out."""
    value = copy.deepcopy(value)
    path = rng.choice(list(places(value)))
    if not path:
        return rng.choice(JUNK)
    inside = value
    for key in path[:-1]:
        inside = inside[key]
    if rng.random() < 0.3:
        del inside[path[-1]]
    else:
        inside[path[-1]] = rng.choice(JUNK)
    return value


@pytest.mark.parametrize("name", ["vqav2_val", "vizwiz_val", "textvqa", "gqa", "pope", "scienceqa_img", "mmbench",
                                  "mmvet", "vqa_rad"])  # fmt: skip
def test_junk_is_named_or_read(tmp_path, name):
    rng = random.Random(name)
    given = known_tasks(data=write_sets(tmp_path / "sets")).tasks[f"{name}_local"]["dataset_kwargs"]
    which = SETS[given["scoring"]]
    entries = list(read_examples(Path(given["data_files"]["test"])).values())
    annotations = {key: read_annotations(Path(file)) for key, file in given.get("annotations", {}).items()}
    read, refused = 0, 0
    for _ in range(150):
        of_entries = rng.random() < 0.5 or not annotations
        try:
            other = annotations
            if not of_entries:
                file = rng.choice(sorted(annotations))
                other = {**annotations, file: spoilt(annotations[file], rng)}
            reader = which.reader(other)
            for entry in spoilt(entries, rng) if of_entries else entries:
                if not isinstance(entry, dict):
                    continue  # refused before
                document = reader(entry)
                if document is None:
                    continue
                json.dumps(document)
                if which.judged_by is not None and document.get(which.judged_by) is not None:
                    assert all(key in which.figures for key in which.score(document, "Yes"))
                read += isinstance(which.upload([Answered(document, "Yes")]), str)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
        except TypeError as error:  # the list itself is junk
            assert "is not iterable" in str(error)
    assert read and refused
