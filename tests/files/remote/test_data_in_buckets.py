"""Training data in a bucket: the same batches as from a disk, of every form, by ranges."""

import gzip
import importlib
import itertools
import json

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.data import data_files, file_records
from moe_jax.data.data_files import DataFile
from moe_jax.data.file_records import JsonLines, TextFile
from moe_jax.data.pipeline import open_data
from moe_jax.data.sections import DataSection, SourceSection
from moe_jax.data.sources import find_files
from moe_jax.data.tokens.token_files import ArrayRecords
from moe_jax.files import objects
from moe_jax.files.byte_files import fingerprint_contents
from moe_jax.files.storage_path import as_path
from tests.files.remote.kills import killed_at, no_waiting  # noqa: F401
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.tiers import first, long
from tests.support.training_models import FFN, config_of, write_config

LINES = [f"the {i}th line says {i * i}" for i in range(400)]
ROWS = [{"text": line} for line in LINES]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    byte_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path


def write_file(path):
    text = "\n".join(LINES)
    lines = "\n\n".join(map(json.dumps, ROWS))
    table = pyarrow.Table.from_pylist([row | {"other": "x" * 50} for row in ROWS])
    match path.name:
        case "a.txt":
            path.write_text(text)
        case "a.txt.gz":
            path.write_bytes(gzip.compress(text.encode()))
        case "a.txt.zst":
            with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
                file.write(text.encode())
        case "a.jsonl":
            path.write_text(lines)
        case "a.parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=70)
        case "file.arrow":
            with pyarrow.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table, 90)
        case "stream.arrow":
            with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table, 90)
    return path


def upload(bucket, folder, prefix):
    for file in folder.iterdir():
        bucket.store(f"{prefix}/{file.name}", file.read_bytes())


def batches(path, folder, *, count=6, state=None, **options):
    section = DataSection(sources=(SourceSection(path=str(path)),), seq_len=32, **options)
    with_open = open_data(section, config_of(FFN), folder / "tokenizer.json", seed=0, batch_size=8, rows=range(8))
    if state is not None:
        with_open.set_state(state)
    found = list(itertools.islice(with_open, count))
    state = with_open.get_state()
    with_open.close()
    return found, state


FORMS = ["a.txt", "a.txt.gz", "a.txt.zst", "a.jsonl", "a.parquet", "file.arrow", "stream.arrow"]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_batches_are_those_of_a_disk(bucket, folder, monkeypatch, name, shuffle):
    monkeypatch.setattr(data_files, "WINDOW_BYTES", 4096)
    monkeypatch.setattr(file_records, "_CHUNK", 1000)
    write_file(folder / "data" / name)
    upload(bucket, folder / "data", "data")
    here, state = batches(folder / "data" / name, folder, shuffle=shuffle)
    there, same_state = batches(f"gs://bucket/data/{name}", folder, shuffle=shuffle)
    assert state == same_state
    further, _ = batches(f"gs://bucket/data/{name}", folder, shuffle=shuffle, state=state)
    here_further, _ = batches(folder / "data" / name, folder, shuffle=shuffle, state=state)
    for one, other in zip([*here, *here_further], [*there, *further], strict=True):
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])


@long
def test_requests_that_fail_are_made_again(bucket, folder):
    failed = {}

    def fault(request):
        failed[request.name] = failed.get(request.name, 0) + 1
        if failed[request.name] % 3 == 1:
            return 503
        if failed[request.name] % 3 == 2:
            raise ConnectionError
        return None

    for name in ("a.txt", "a.parquet"):
        write_file(folder / "data" / name)
        upload(bucket, folder / "data", "data")
        bucket.fault = None
        here, _ = batches(folder / "data" / name, folder)
        bucket.fault = fault
        there, _ = batches(f"gs://bucket/data/{name}", folder)
        np.testing.assert_array_equal(here[-1]["tokens"], there[-1]["tokens"])
    assert max(failed.values()) > 2


def test_little_is_read_of_a_large_text(bucket):
    content = (b"some words of a line\n" * 50)[:1000] * 30_000
    bucket.store("large.txt", content)
    file = TextFile(as_path("gs://bucket/large.txt"), piece=64 << 10)
    assert len(file) == -(-len(content) // (64 << 10))
    bucket.bytes_read = 0
    assert file[200][0].text.startswith("some words")
    assert bucket.bytes_read == 128 << 10  # the piece, and the next one, in which it ends
    bucket.bytes_read, before = 0, len(bucket.requests)
    whole = "".join(example.text for index in range(40) for example in file[index])
    assert whole.encode() == content[: len(whole)]
    assert len(bucket.requests) - before <= 3 and bucket.bytes_read <= 3 * data_files.WINDOW_BYTES
    # What the processes compare at the start is a sample.
    bucket.bytes_read = 0
    fingerprint = fingerprint_contents([as_path("gs://bucket/large.txt")])
    assert bucket.bytes_read < 3 << 20
    bucket.store("same.txt", content)
    assert fingerprint_contents([as_path("gs://bucket/same.txt")]) == fingerprint
    bucket.store("large.txt", content)
    with pytest.raises(InputError, match="gs://bucket/large.txt was replaced while"):
        file[300]


def test_where_lines_begin_is_kept(bucket, folder, monkeypatch):
    monkeypatch.setattr(file_records, "_CHUNK", 1 << 14)
    monkeypatch.setattr(data_files, "WINDOW_BYTES", 1 << 12)
    monkeypatch.setattr(objects, "_REST", 1 << 12)
    lines = [json.dumps({"text": f"{i} " * (i % 50)}) for i in range(5000)]
    lines[17] = ""
    lines[4000] = '{"text": 5}'
    bucket.store("a.jsonl", "\n".join(lines).encode())
    place = as_path("gs://bucket/a.jsonl")
    assert len(JsonLines(place)) == 4999
    bucket.bytes_read = 0
    records = JsonLines(place)
    assert bucket.bytes_read < 1 << 17
    bucket.bytes_read = 0
    assert records[3000][0].text == "3001 " * (3001 % 50)
    assert bucket.bytes_read == len(lines[3001]) + 1
    with pytest.raises(InputError, match=r"gs://bucket/a.jsonl, line 4001: expected"):
        records[3999]
    bucket.store("a.jsonl", "\n".join(lines[:100]).encode())
    assert len(JsonLines(place)) == 99


def test_patterns(bucket):
    for name in ("d/a.txt", "d/b.txt", "d/.c.txt", "d/e/f.txt", "d/e/g/h.txt", "d[1]/a.txt", "x.txt"):
        bucket.store(name, b"x")

    def found(pattern):
        return [str(path).removeprefix("gs://bucket/") for path in find_files(f"gs://bucket/{pattern}")]

    assert found("d/*.txt") == ["d/a.txt", "d/b.txt"]
    assert found("d/[ab].*") == ["d/a.txt", "d/b.txt"]
    assert found("d/.c.txt") == ["d/.c.txt"]
    assert found("d/**/*.txt") == ["d/a.txt", "d/b.txt", "d/e/f.txt", "d/e/g/h.txt"]
    assert found("*/e/*.txt") == ["d/e/f.txt"]
    assert found("*.txt") == ["x.txt"]
    assert found("d[1]/a.txt") == ["d[1]/a.txt"]
    bucket.delay = 1000
    bucket.store("d/new.txt", b"x")
    assert found("d/new.txt") == ["d/new.txt"]
    with pytest.raises(FileNotFoundError, match=r"no file matches gs://bucket/n\*.txt \(by what listings show\)"):
        find_files("gs://bucket/n*.txt")


@pytest.mark.parametrize("options", ["group_size:1", "group_size:1,uncompressed", "group_size:1,brotli:3"])
@pytest.mark.parametrize(("count", "longest"), [(1, 10), (300, 3000), (20, 90_000), (9, 65_472), (9, 65_448)])
def test_array_records_are_read_as_the_library_wrote_them(tmp_path, options, count, longest):
    from array_record.python.array_record_module import ArrayRecordWriter

    rng = np.random.default_rng(0)
    sizes = rng.integers(longest // 2, longest + 1, count)
    records = [rng.bytes(size) if i % 2 else b"ab" * (size // 2) for i, size in enumerate(sizes)]
    records[-1] = b""
    writer = ArrayRecordWriter(str(tmp_path / "a"), options)
    for record in records:
        writer.write(record)
    writer.close()
    found = ArrayRecords(DataFile(tmp_path / "a"))
    assert [found[i] for i in range(len(found))] == records


def test_damaged_array_records(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(tmp_path / "a"), "group_size:1")
    for i in range(50):
        writer.write(b"%d" % i * 100)
    writer.close()
    whole = (tmp_path / "a").read_bytes()
    rng = np.random.default_rng(0)
    bad = [whole[:-1], whole[: 1 << 16], b"", whole + b"x", bytes(1 << 17)]
    for _ in range(300):
        spoilt = bytearray(whole)
        for place in rng.integers(0, 80_000, 20):
            spoilt[place] ^= int(rng.integers(1, 256))
        bad.append(bytes(spoilt))
    for content in bad:
        (tmp_path / "b").write_bytes(content)
        try:
            found = ArrayRecords(DataFile(tmp_path / "b"))
            for index in range(len(found)):
                assert len(found[index]) < 1 << 20
        except (ValueError, OSError):
            continue


RECIPE = """
run_dir = "run"
[model]
config = "gs://bucket/in/config.json"
init = "random"
[data]
tokenizer = "gs://bucket/in/tokenizer.json"
seq_len = 16
sources = [{ path = "gs://bucket/data/a.jsonl" }]
[train]
batch_size = 8
"""


@long
def test_data_are_inspected_and_tokenised_there(bucket, folder, monkeypatch, capsys, no_waiting):  # noqa: F811
    module = importlib.import_module("moe_jax.data.tokenize_sources")
    monkeypatch.setattr(module, "LEAST_BYTES", 2000)
    write_file(folder / "data" / "a.jsonl")
    upload(bucket, folder / "data", "data")
    write_config(folder / "config.json", config_of(FFN))
    for name in ("config.json", "tokenizer.json"):
        bucket.store(f"in/{name}", (folder / name).read_bytes())
    bucket.store("in/recipe.toml", RECIPE.encode())
    recipe, out = "gs://bucket/in/recipe.toml", "gs://bucket/tokens"
    assert cli.main(["data", "inspect", recipe, "--examples", "1"]) == 0
    assert "he 0th line says 0" in capsys.readouterr().out

    def job():
        assert cli.main(["data", "tokenize", recipe, out]) == 0

    for number in first(1, 80, 60):
        assert killed_at(number, job, monkeypatch)
        assert "tokens/tokens.json" not in bucket.names()
    bucket.delay = 1000
    bucket.requests.clear()
    job()
    puts = [request.name for request in bucket.requests if request.verb == "put" and request.name.startswith("tokens/")]
    assert puts[-1] == "tokens/tokens.json"
    assert not [name for name in bucket.names() if "partial" in name]
    capsys.readouterr()
    assert cli.main(["data", "tokenize", recipe, out]) == 2
    assert "gs://bucket/tokens already exists" in capsys.readouterr().err
    assert cli.main(["data", "tokenize", recipe, "tokens", "--processes", "2"]) == 0
    for file in (folder / "tokens").glob("*.array_record"):
        assert bucket.content(f"tokens/{file.name}") == file.read_bytes()
    bucket.delay = 0
    for name in list(bucket.names()):
        bucket.store(name, bucket.content(name))
    here, state = batches(folder / "data" / "a.jsonl", folder)
    bucket.bytes_read = 0
    there, same_state = batches(f"{out}/source-0-*.array_record", folder)
    assert same_state["rows"] == state["rows"]
    np.testing.assert_array_equal(here[-1]["tokens"], there[-1]["tokens"])


def test_texts_of_commands(bucket, folder, capsys):
    from tests.support.dense_models import random_leaves, write_model

    config = config_of(FFN)
    write_model(folder / "dense", config, random_leaves(config), (folder / "tokenizer.json",))
    (folder / "text.txt").write_text("\n".join(LINES))
    bucket.store("text.txt", (folder / "text.txt").read_bytes())
    said = []
    for text in ("text.txt", "gs://bucket/text.txt"):
        assert cli.main(["eval", "dense", "--text", text, "--seq-len", "32", "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out)["nll"])
    assert said[0] == said[1]
    labelled = "".join(json.dumps({"text": line, "label": i % 2}) + "\n" for i, line in enumerate(LINES[:10]))
    bucket.store("labels.jsonl", labelled.encode())
    assert cli.main(["eval", "dense", "--classify", "gs://bucket/labels.jsonl", "--labels", "no,yes"]) == 0
    bucket.store("prompts.txt", b"the first\nthe second\n")
    assert cli.main(["generate", "dense", "--prompts-file", "gs://bucket/prompts.txt", "--max-new-tokens", "1"]) == 0
