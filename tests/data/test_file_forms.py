"""What is no text is not read as text without being asked, whatever its name; a list of objects is read as its rows."""

import gzip
import json

import pytest

from moe_jax.core.errors import InputError
from moe_jax.data.data_files import DataFile
from moe_jax.data.file_forms import as_json_lines, check_file_is_text
from moe_jax.data.file_records import JsonLines
from moe_jax.data.sections import DataSection, SourceSection, form_of_name
from moe_jax.data.sources import open_files
from moe_jax.evaluation.held_out import read_text
from tests.support.dense_models import dense_config

ROWS = [{"text": "a\n[b]"}, {"text": 'c"}, {'}, {"text": "é"}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def texts(path) -> list[str]:
    file = JsonLines(as_json_lines(path, DataFile(path)), name=path)
    return [example.text for index in range(len(file)) for example in file[index]]


@pytest.mark.parametrize("how", [{}, {"indent": 2}, {"separators": (",", ":"), "ensure_ascii": False}])
def test_a_list_has_the_rows_of_json_lines(tmp_path, how):
    for content in (json.dumps(ROWS, **how), f"\ufeff\r\n {json.dumps(ROWS, **how)} \n"):
        (tmp_path / "a.json").write_text(content, encoding="utf-8", newline="")
        assert texts(tmp_path / "a.json") == [row["text"] for row in ROWS]
    (tmp_path / "a.json").write_text(" [ ]")
    assert texts(tmp_path / "a.json") == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"text": "a"} {"text": "b"}]', "expected ',' or ']' at line 1, column 16"),
        ('[{"text": "a"},\n {"text": ', "line 2, column 11"),
        ('[{"text": "a"}]\n[{"text": "b"}]', "after the list at line 2, column 1"),
        ("[" * 200_000, "nested too deeply"),
    ],
)
def test_a_list_that_is_none(tmp_path, content, said):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError) as error:
        texts(tmp_path / "a.json")
    assert str(error.value).startswith(f"{tmp_path}/a.json is a list that is ") and said in str(error.value)
    assert not list((tmp_path / "cache").rglob("*.list"))


def test_a_duplicate_key_in_a_list_is_found(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "a"},\n{"text": "b",\n "text": "c"}]')
    section, source = DataSection(), SourceSection(path=str(tmp_path / "a.json"))
    files = [(tmp_path / "a.json", DataFile(tmp_path / "a.json"))]
    with pytest.raises(InputError, match="a.json, entry 2: .*the key 'text'"):
        open_files(source, files, section, dense_config(), tmp_path, template=lambda: None, piece=1 << 20)


def test_numbers_of_any_length_are_passed_over(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "a", "n": ' + "1" * 5000 + "}]")
    with pytest.raises(InputError, match="a.json, line 1: "):
        texts(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.JSONL", "jsonl"), ("a.ndjson.gz", "jsonl"), ("a.jsonlines", "jsonl"), ("*.json*", "jsonl"),
        ("a.Parquet", "parquet"), ("b.jsonl.ZST", "jsonl"), ("a.txt", "text"), ("a", "text"), ("v1.2", "text"),
    ],
)  # fmt: skip
def test_forms_of_names(name, form):
    assert form_of_name(name) == form == SourceSection(path=name).form


JSON = b'{"text": "hello"}\n{"text": "b"}\n'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"text,label\nhello,1\n", "is a table in the form .csv"),
        ("a.jsonl.bz2", JSON, "is compressed as .bz2"),
        ("a.txt", JSON, "looks like JSON"),
        ("a.txt", b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode(), "looks like JSON"),
        ("a", json.dumps(ROWS, indent=1).encode(), "looks like JSON"),
        ("a.txt", json.dumps(ROWS[0], indent=1).encode(), "looks like JSON"),
        ("a.log", json.dumps({"text": "x" * 100_000}).encode(), "looks like JSON"),
        ("a.jsonl", JSON, "is no text by its name (.jsonl)"),
        ("a.pdf", b"%PDF", "is no text by its name (.pdf)"),
        ("a.txt", b"PAR1 and more", "is a parquet file by its first bytes"),
        ("a.txt", gzip.compress(JSON, mtime=0), "compressed by gzip"),
        ("a.txt", "hello".encode("utf-16-le"), "in UTF-16"),
    ],
)
def test_what_is_no_text_is_not_trained_on_or_scored_as_text(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        check_file_is_text(path, path)
    assert str(error.value).startswith(str(path)) and said in str(error.value) and len(str(error.value)) < 300
    with pytest.raises(InputError) as error:  # before a tokenizer, of which there is none, is asked
        read_text(path, None)
    assert str(error.value).startswith(str(path))
    files = [(path, DataFile(path))]

    def opened(**how):
        section = DataSection()
        source = SourceSection(path=str(tmp_path / "*"), **how)
        return open_files(source, files, section, dense_config(), path, template=lambda: None, piece=1 << 20)

    with pytest.raises(InputError, match='format = ".*"text"'):
        opened()
    if content.startswith(b"{"):
        assert opened(format="text")[0][0].text.encode() == content


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[1] A. Author, a title\n", "{braces} begin this\n", "[[link]]\n", "{% if a %}", '{"a"} or\n'),
        '{"a": 1}\nis an object.',
    ],
)
def test_texts_are_texts(tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    check_file_is_text(tmp_path / "a.txt", tmp_path / "a.txt")
