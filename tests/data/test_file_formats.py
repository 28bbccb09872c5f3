"""Parquet, arrow, gz and zst: the rows of JSON lines in other files, resumed anywhere, and mistakes named."""

import gzip
import json
import os
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moe_jax.core.errors import InputError
from moe_jax.data.data_files import cached_copy, uncompressed
from moe_jax.data.pipeline import open_data
from moe_jax.data.sections import DataSection, SourceSection
from tests.data.test_chat_data import CONFIG
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.chat_templates import TURNS, plain

CHAT = [{"messages": [{**TURNS[0], "content": f"What is {i}?"}, TURNS[1]], "id": i} for i in range(40)]
TEXT = [{"text": f"document number {i} é", "id": i} for i in range(3000)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder, form, rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = folder / f"a.{form}"
    table = pa.Table.from_pylist(rows)
    if form == "jsonl":
        path.write_bytes(lines)
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(lines[:100]) + gzip.compress(lines[100:]))
    elif form == "jsonl.zst":
        path.write_bytes(b"".join(pa.compress(part, "zstd", asbytes=True) for part in (lines[:100], lines[100:])))
    elif form == "parquet":
        pq.write_table(table, path, row_group_size=700)
    elif form == "feather":
        with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            writer.write_table(table, max_chunksize=500)
    else:  # as Hugging Face's datasets write them
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    return path


def opened(folder, path, seq_len=64, **options):
    byte_tokenizer(folder / "tokenizer.json")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": plain("chatml")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    source = SourceSection(path=str(path), **options)
    section = DataSection(sources=(source,), seq_len=seq_len, prefetch=0)
    return open_data(section, CONFIG, folder / "tokenizer.json", seed=3, batch_size=2, rows=range(2))


def equal(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


FORMS = ["jsonl.gz", "jsonl.zst", "parquet", "feather", "arrow"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [CHAT, TEXT], ids=["chat", "text"])
def test_every_format_gives_the_batches_of_json_lines_and_goes_on_in_the_middle(tmp_path, form, rows):
    want, got = (opened(tmp_path, write(tmp_path, name, rows)) for name in ("jsonl", form))
    for _ in range(7):
        assert equal(next(want), next(got))
    state = json.loads(json.dumps(got.get_state()))
    expected = [next(got) for _ in range(5)]
    again = opened(tmp_path, tmp_path / f"a.{form}")
    again.set_state(state)
    assert all(equal(next(again), batch) for batch in expected)


def test_a_copy_is_made_once_of_the_columns_that_are_needed_and_anew_of_another_file(tmp_path):
    path = write(tmp_path, "parquet", TEXT)
    opened(tmp_path, path)
    [copy] = (tmp_path / "cache").rglob("*.arrow")
    made = copy.stat().st_mtime_ns
    with pa.ipc.open_file(copy) as file:
        assert file.schema.names == ["text"] and file.num_record_batches == 3
    opened(tmp_path, path)
    assert copy.stat().st_mtime_ns == made
    write(tmp_path, "parquet", TEXT[:2000])
    assert next(opened(tmp_path, path))["tokens"].shape == (2, 64)
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) == 2
    assert not list((tmp_path / "cache").rglob("*.new"))


def test_a_copy_is_made_where_it_stays_and_only_of_a_whole_file(tmp_path, monkeypatch):
    """To move it there from another disk would be to copy it again; what is not whole yet has another name."""
    folder, file = tmp_path / "cache" / "moe_jax" / "data", tmp_path / "a"
    file.write_text("a")
    written: list[pathlib.Path] = []

    def write(handle, content=b"copy"):
        handle.write(content)
        (path,) = folder.iterdir()
        assert os.path.samestat(path.stat(), os.fstat(handle.fileno()))
        written.append(path)
        if content != b"copy":
            raise RuntimeError

    with pytest.raises(RuntimeError):
        cached_copy(file, "form of it", lambda handle: write(handle, b"half of it"))
    assert not [*folder.iterdir()]
    copy = cached_copy(file, "form of it", write)
    assert copy.parent == folder and copy.suffix == ".form" and copy.read_bytes() == b"copy"
    assert [*folder.iterdir()] == [copy] and copy not in written
    assert cached_copy(file, "form of it", write) == copy and len(written) == 2
    copy.unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")  # no absolute path, which the standard has ignored
    monkeypatch.setattr(pathlib.Path, "home", lambda: tmp_path)
    (tmp_path / ".cache").symlink_to(tmp_path / "cache")
    assert cached_copy(file, "other form", write).parent == tmp_path / ".cache" / "moe_jax" / "data"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.parquet", b"not a table", "a.parquet is .* of parquet: "),
        # pyarrow goes on: "Either the file is corrupted or this is not a parquet file."
        ("a.parquet", b"not a table" * 99, "a.parquet is not a file of parquet: Parquet magic bytes not found in .*r$"),
        ("a.arrow", b"not a table", "a.arrow is .* of arrow: "),
        ("a.txt.gz", b"not compressed", "a.txt.gz is .* gzip file: "),
        # Without the time, which would be in the names of tests: all processes must find the same ones.
        ("a.txt.gz", gzip.compress(b"some text" * 99, mtime=0)[:-9], "a.txt.gz is .* gzip file: "),
        ("a.txt.zst", b"not compressed", "a.txt.zst is .* zstd file: "),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n{"txt": "b"}\n', mtime=0), "a.jsonl.gz, line 2: expected "),
    ],
)
def test_a_broken_file_is_one_line_and_leaves_no_copy_that_looks_whole(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=complaint) as error:
        opened(tmp_path, tmp_path / name)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert not list((tmp_path / "cache").rglob("*.new")) and not list((tmp_path / "cache").rglob("*.arrow"))


def test_rows_and_columns_are_named_in_errors(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"text": "a"}, {"text": None}]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet, row 2: expected .* got .* keys 'text'"):
        opened(tmp_path, tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist([{"body": "a"}]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: expected columns .* got 'body'"):
        opened(tmp_path, tmp_path / "a.parquet")


def test_a_file_that_is_not_compressed_is_read_where_it_is(tmp_path):
    assert uncompressed(tmp_path / "a.txt") == tmp_path / "a.txt"
