"""Which sources a calibration names, in one word, a list, a dict or a file, and which share each of them gives."""

from pathlib import Path

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from moe_jax.core.errors import InputError
from moe_jax.data.calibration_texts.weighted_sources import (
    BUILT_IN,
    SELF,
    WeightedSource,
    describe_sources,
    files_of,
    shares,
    weighted_sources,
)
from moe_jax.data.sections import FieldsSection, SourceSection


def named(given):
    return [(one.name, one.weight, one.file is not None) for one in weighted_sources(given)]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a.txt", [("a.txt", 1, True)]),
        (Path("a.txt"), [("a.txt", 1, True)]),
        ("a.txt:2,b.jsonl", [("a.txt", 2, True), ("b.jsonl", 1, True)]),
        ("a.txt:0.5, self:1e-3,built-in", [("a.txt", 0.5, True), (SELF, 0.001, False), (BUILT_IN, 1, False)]),
        ("gs://bucket/a.txt", [("gs://bucket/a.txt", 1, True)]),
        ("gs://bucket/a.txt:3", [("gs://bucket/a.txt", 3, True)]),
        ("./self", [("./self", 1, True)]),
        (["a.txt", Path("self")], [("a.txt", 1, True), ("self", 1, True)]),
        ({"a.txt": 2, Path("b.txt"): 1, "self": 1}, [("a.txt", 2, True), ("b.txt", 1, True), (SELF, 1, False)]),
        ([SourceSection(path="a.jsonl", weight=4, chat=True)], [("a.jsonl", 4, True)]),
    ],
)
def test_sources_by_name_and_weight(given, found):
    assert named(given) == found


def test_a_file_is_itself_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one,two.txt", "three:4", "five:x"):
        Path(name).write_text("a text")
        assert named(name) == [(name, 1, True)]
    assert named("three:4:2,a") == [("three:4", 2, True), ("a", 1, True)]


def test_a_file_of_sources(tmp_path):
    file = tmp_path / "mixture.toml"
    file.write_text(
        '[[sources]]\npath = "chats.jsonl"\nweight = 3\nfields = { prompt = "q", response = "a" }\nchat = true\n'
        '[[sources]]\npath = "self"\n'
    )
    for given in (file, str(file)):
        chats, own = weighted_sources(given)
        assert chats.weight == 3 and own == WeightedSource(name=SELF)
        assert chats.file == SourceSection(
            path="chats.jsonl", fields=FieldsSection(prompt="q", response="a"), chat=True
        )
    assert named({str(file): 2, "a.txt": 1}) == [("chats.jsonl", 6, True), (SELF, 2, False), ("a.txt", 1, True)]
    assert describe_sources(weighted_sources(file))[0]["fields"]["prompt"] == "q"
    file.write_text('sources = [{path = "a.txt", wight = 2}]')
    with pytest.raises(InputError, match="did you mean"):
        weighted_sources(file)
    with pytest.raises(FileNotFoundError):
        weighted_sources(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("a.txt:0", "number above 0"),
        ("a.txt:-1", "number above 0"),
        ("a.txt:nan", "number above 0"),
        ("a.txt:inf", "number above 0"),
        ({"a.txt": True}, "number above 0"),
        ({"a.txt": "2"}, "number above 0"),
        ("a.txt:much", "is no number"),
        ("a.txt,,b.txt", "expected FILE:WEIGHT"),
        (":2", "expected FILE:WEIGHT"),
        ("a.txt,b.txt,./a.txt:3", "'./a.txt' twice"),
        ("self,self:2", "'self' twice"),
        ([], "names no source"),
        ([SourceSection(path="a.txt", separator="#")], "leave separator out"),
    ],
)
def test_what_is_no_source(given, said):
    with pytest.raises(InputError, match=said) as found:
        weighted_sources(given)
    assert "\n" not in str(found.value)


@drawn(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), st.integers(0, 500))
def test_shares_are_those_of_the_weights(weights, more):
    sources = [WeightedSource(name=str(i), weight=weight) for i, weight in enumerate(weights)]
    samples = 1000 + more
    counts = shares(samples, sources)
    assert sum(counts) == samples
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - samples * weight / sum(weights)) < 1


def test_a_source_without_a_share_is_refused():
    sources = weighted_sources("a.txt:1000,b.txt")
    assert shares(2000, sources) == [1998, 2]
    with pytest.raises(InputError, match="'b.txt' has less than"):
        shares(16, sources)


def test_files_are_those_that_can_be_read_beforehand():
    assert files_of(weighted_sources("a.txt:2,self,b*.jsonl,built-in")) == (Path("a.txt"),)
    assert describe_sources(weighted_sources("a.txt")) == "a.txt"
    assert describe_sources(weighted_sources("a.txt:2,self")) == [
        {"path": "a.txt", "weight": 2.0},
        {"path": "self", "weight": 1.0},
    ]
