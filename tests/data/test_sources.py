"""Text pieces and JSONL lines: nothing lost, nothing twice, and mistakes named by file and line."""

import json
from codecs import BOM_UTF8

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.core.errors import InputError
from moe_jax.data.file_records import JsonLines, TextFile
from moe_jax.data.sections import FieldsSection, SourceSection
from moe_jax.data.sources import Files, find_files

text = st.text(alphabet="ab\n\u00e9\u6f22|", max_size=80)


@settings(max_examples=200, deadline=None)
@given(text, st.integers(4, 20))
def test_pieces_of_a_text_join_to_the_text(tmp_path_factory, content, piece):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(content.encode())
    records = TextFile(path, piece=piece)
    examples = [example for i in range(len(records)) for example in records[i]]
    assert "".join(example.text for example in examples) == content
    assert all(len(example.text.encode()) <= 2 * piece for example in examples)
    if content:
        assert [example.begins for example in examples] == [True] + [False] * (len(examples) - 1)
        assert [example.ends for example in examples] == [False] * (len(examples) - 1) + [True]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text(alphabet="ab\n\u00e9-", min_size=1, max_size=12), min_size=1, max_size=9),
    st.integers(16, 40),
    st.sampled_from(("<|>", "\n", "\n\n", "---", "-\n-")),
)
def test_a_separator_divides_documents_and_pieces_begin_at_it(tmp_path_factory, documents, piece, separator):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    content = separator.join(documents)
    path.write_bytes(content.encode())
    documents = [document for document in content.split(separator) if document]
    records = TextFile(path, piece=piece, separator=separator)
    got, current = [], ""
    for example in (example for i in range(len(records)) for example in records[i]):
        assert example.begins == (current == "")
        current += example.text
        if example.ends:
            got.append(current)
            current = ""
    assert current == ""
    assert got == documents


def test_pieces_are_cut_at_line_ends(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i} of this text\n" for i in range(200)))
    records = TextFile(path, piece=256)
    assert len(records) > 10
    assert all(records[i][0].text.endswith("\n") for i in range(len(records)))
    assert all(records[i][0].text.startswith("line") for i in range(len(records)))


@pytest.mark.parametrize("piece", [2, 64])
def test_a_byte_order_mark_is_no_text(tmp_path, piece):
    path = tmp_path / "text.txt"
    path.write_bytes(BOM_UTF8 + "abc\ufeff\n".encode())
    records = TextFile(path, piece=piece)
    assert "".join(example.text for i in range(len(records)) for example in records[i]) == "abc\ufeff\n"


def test_a_text_that_is_not_utf8_is_named_with_the_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n" * 10 + b"\xff\xfe\n")
    with pytest.raises(InputError, match=r"a\.txt is not UTF-8 text at byte 50"):
        TextFile(path, piece=64)[0]


def test_jsonl_skips_blank_lines_and_needs_no_last_line_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n \n{"prompt": "2+2=", "response": "4", "id": 7}\n{"text": "three"}')
    records = JsonLines(path)
    examples = [example for i in range(len(records)) for example in records[i]]
    assert [example.text for example in examples] == ["one", "2+2=4", "three"]
    assert [example.prompt_chars for example in examples] == [0, 4, 0]
    assert [example.is_response for example in examples] == [False, True, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "is not valid JSON"),
        ('{"text": "a", "text": "b"}', "line that: the key 'text'"),
        ('{"text": "a", "x": ' + "[" * 50_000 + "}", "nested more than 100 levels"),
        ('{"text": "\\ud800"}', "'text' holding one half of a character in UTF-16"),
        ('{"' + "x" * 100_000 + '": 1}', "with the keys 'xxxx"),
        ("[1, 2]", "a JSON list"),
        ('{"prompt": "a"}', "with the keys 'prompt'"),
        ('{"text": "a", "prompt": "b", "response": "c"}', "with the keys"),
        ('{"text": 5}', "'text' holding a int"),
    ],
)
def test_a_bad_jsonl_line_is_named_with_what_was_expected(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n\n" + line + "\n")
    with pytest.raises(InputError) as error:
        JsonLines(path)[1]
    assert str(error.value).startswith(f'{path}, line 3: expected {{"text": "..."}}')
    # However long the line is, and whatever folder it lies in.
    assert message in str(error.value) and len(str(error.value)) < 400 + len(str(tmp_path))


def test_files_are_found_by_pattern_and_read_one_after_the_other(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(f"this is {name}")
    (tmp_path / "c.txt").write_text("")
    paths = find_files(str(tmp_path / "*.txt"))
    records = Files([TextFile(path, piece=1024) for path in paths])
    assert [records[i][0].text for i in range(len(records))] == ["this is a.txt", "this is b.txt"]
    with pytest.raises(FileNotFoundError, match="no file matches .*nothing"):
        find_files(str(tmp_path / "nothing*"))


def test_the_folder_before_a_pattern_is_none(tmp_path, monkeypatch):
    for folder in ("run[1]", "run1", "run[1]/a/b"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "x.txt").write_text(folder)
    assert find_files(str(tmp_path / "run[1]" / "*.txt")) == [tmp_path / "run[1]" / "x.txt"]
    assert len(find_files(str(tmp_path / "run[1]" / "**" / "*.txt"))) == 2
    monkeypatch.chdir(tmp_path / "run[1]")
    assert [str(path) for path in find_files("[w-z].txt")] == ["x.txt"]


def test_sources_that_cannot_be():
    for options, said in (
        ({"weight": 0}, "weight = 0 must"),
        ({"weight": -1.0}, "weight = -1.0 must"),
        ({"weight": float("nan")}, "weight = nan must"),
        ({"separator": ""}, "separator is empty"),
        ({"chat": True}, "fields and chat"),
        ({"fields": FieldsSection(prompt="a", response="b")}, "fields and chat"),
    ):
        with pytest.raises(InputError, match=said):
            SourceSection(path="a.txt", **options)
    SourceSection(path="a.txt", weight=1e-9, separator=" "), SourceSection(path="a.jsonl", chat=True)
