"""Tokens made before training: the batches are those of their sources, whoever made them, killed or not."""

import errno
import json
import os
import signal
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.conversion import read_hf_config
from moe_jax.core.errors import InputError
from moe_jax.data import tokenize_sources as tokenizing
from moe_jax.data.pipeline import open_data
from moe_jax.data.sections import DataSection, SourceSection
from moe_jax.data.tokenize_sources import Task, preview, source_patterns, tokenize, totals
from moe_jax.data.tokenizer import Document
from moe_jax.data.tokens.token_files import INDEX, pack, unpack
from moe_jax.files.staging import leftovers
from tests.data.test_chat_data import CONFIG
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.chat_templates import TURNS, plain
from tests.support.disks import small_disk
from tests.support.environment import ROOT
from tests.support.forked import start
from tests.support.hf_checkpoints import CONFIGS


def a_task(folder, **options):
    """Texts and conversations, of which the conversations are three quarters."""
    byte_tokenizer(folder / "tokenizer.json", adds_bos=True)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": plain("chatml")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "a.txt").write_text("".join(f"line {i} é\n" for i in range(900)))
    rows = [{"messages": [{**TURNS[0], "content": f"What is {i}?"}, TURNS[1]]} for i in range(50)]
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (
        SourceSection(path=str(folder / "a.txt"), weight=1),
        SourceSection(path=str(folder / "b.jsonl"), weight=3),
    )
    section = DataSection(sources=sources, **{"seq_len": 32, "prefetch": 0, **options})
    return Task(section, CONFIG, folder / "tokenizer.json", 2)


def opened(task, sources=None):
    section = task.section
    if sources is not None:
        new = tuple(
            SourceSection(path=path, weight=old.weight) for path, old in zip(sources, section.sources, strict=True)
        )
        section = DataSection(sources=new, seq_len=32, prefetch=0, bos=section.bos)
    return open_data(section, CONFIG, task.tokenizer_path, seed=5, batch_size=2, rows=range(2))


def equal(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(tokenizing, "LEAST_BYTES", 2000)


@settings(max_examples=50)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from([0, 1, 65535, 65536, 2**31 - 1]), st.booleans()), max_size=20), max_size=5
    ),
    st.booleans(),
)
def test_a_record_holds_documents_as_they_were(documents, all_scored):
    given = [
        Document(np.array([i for i, _ in d], np.int32), np.array([s or all_scored for _, s in d], np.float32))
        for d in documents
    ]
    got = unpack(pack(given))
    assert len(got) == len(given)
    for one, other in zip(got, given, strict=True):
        assert np.array_equal(one.ids, other.ids) and np.array_equal(one.scored, other.scored)
        assert one.ids.dtype == np.int32 and one.scored.dtype == np.float32


@pytest.mark.parametrize(
    ("with_encoder", "lengths", "too_long"),
    [
        (False, {"seq_len": 12}, 2),
        (False, {"seq_len": 13}, 1),  # 14 tokens, of which 13 have a next one
        (False, {"seq_len": 13, "input_len": 99}, 1),  # nothing has inputs apart
        (True, {"seq_len": 11}, 1),  # inputs may be as long as targets
        (True, {"seq_len": 10, "input_len": 13}, 0),
        (True, {"seq_len": 99, "input_len": 9}, 2),
        (True, {"seq_len": 9, "input_len": 99}, 1),
    ],
)
def test_a_preview_counts_what_does_not_fit(tmp_path, with_encoder, lengths, too_long, monkeypatch):
    """All documents end with a token, and inputs of an encoder, too."""
    byte_tokenizer(tmp_path / "tokenizer.json")
    pairs = [("p" * 3, "c" * 2), ("p" * 9, "c" * 4), ("p" * 12, "c" * 9)]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = read_hf_config({**CONFIGS["t5"], "vocab_size": CONFIG.vocab_size}) if with_encoder else CONFIG
    section = DataSection(sources=(SourceSection(path=str(file)),), prefetch=0, **lengths)
    expected = [len(prompt + completion) + 1 + with_encoder for prompt, completion in pairs]

    def found(count=0):
        [source] = preview(section, config, tmp_path / "tokenizer.json", batch_size=2, count=count)
        return source

    whole = found(2)
    assert (whole.records, whole.counted_records, whole.documents, whole.bytes) == (3, 3, 3, file.stat().st_size)
    assert (whole.tokens, whole.estimated_tokens, whole.longest) == (sum(expected), sum(expected), expected[-1])
    assert (whole.scored, whole.too_long) == (sum(len(completion) + 1 for _, completion in pairs), too_long)
    assert [[part.scored for part in parts] for parts in whole.shown] == [[False, True]] * 2
    assert [part.text[:2] for part in whole.shown[0]] == ["pp", "cc"]
    monkeypatch.setattr(tokenizing, "MOST_DOCUMENTS", 2)
    some = found()
    assert (some.records, some.counted_records, some.documents, some.shown) == (3, 2, 2, ())
    assert (some.tokens, some.estimated_tokens) == (sum(expected[:2]), sum(expected[:2]) * 3 // 2)


def test_training_on_tokens_is_training_on_their_sources_and_goes_on_in_the_middle(tmp_path, small_shards):
    task = a_task(tmp_path)
    index = tokenize(task, tmp_path / "out")
    patterns = source_patterns(tmp_path / "out", task.section)
    assert len(list((tmp_path / "out").glob("source-0-*"))) > 2
    texts, tokens = opened(task), opened(task, patterns)
    for _ in range(9):
        assert equal(next(texts), next(tokens))
    state = json.loads(json.dumps(tokens.get_state()))
    expected = [next(tokens) for _ in range(6)]
    again = opened(task, patterns)
    again.set_state(state)
    assert all(equal(next(again), batch) for batch in expected)
    of_text, of_chat = totals(index)
    assert of_text["tokens"] == of_text["scored"] == (tmp_path / "a.txt").stat().st_size + 1  # bytes, and BOS
    assert of_chat["documents"] == of_chat["records"] == 50
    assert of_chat["scored"] == 50 * len("It is 4.<|im_end|>")
    assert of_chat["source_bytes"] == (tmp_path / "b.jsonl").stat().st_size


def test_two_processes_write_what_one_does(tmp_path, small_shards):
    task = a_task(tmp_path)
    tokenize(task, tmp_path / "one")
    seen = []
    tokenize(task, tmp_path / "two", processes=2, progress=lambda what, done, total: seen.append((done, total)))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] == len(files_of(tmp_path / "two")) - 1


_KILLED = """
import sys, pathlib
from moe_jax.data import tokenize_sources as tokenize
from tests.data.test_token_files import a_task
tokenize.LEAST_BYTES = 2000
folder = pathlib.Path(sys.argv[1])
def progress(what, done, total):
    if done == 2:
        (folder / "two").touch()
        import time; time.sleep(100)
tokenize.tokenize(a_task(folder), folder / "out", progress=progress)
"""


def test_killed_it_leaves_no_directory_and_goes_on(tmp_path, small_shards, monkeypatch):
    task = a_task(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    process = start(command, imports=("tests.data.test_token_files",), env=environment, cwd=ROOT)
    while not (tmp_path / "two").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    [begun] = leftovers(tmp_path / "out")
    (begun / ".source-0.1.new").write_text("what a killed process had begun")
    kept = sorted(begun.glob("source-*"))
    times = [file.stat().st_mtime_ns for file in kept]
    tokenize(task, tmp_path / "out")
    assert [(tmp_path / "out" / file.name).stat().st_mtime_ns for file in kept[:2]] == times[:2]
    tokenize(task, tmp_path / "again")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "again")


def test_what_was_begun_with_other_files_is_not_gone_on_with(tmp_path, small_shards):
    class Stops(Exception): ...

    def stops(what, done, total):
        if done == 2:
            raise Stops

    task = a_task(tmp_path)
    with pytest.raises(Stops):
        tokenize(task, tmp_path / "out", progress=stops)
    text = (tmp_path / "a.txt").read_text()
    (tmp_path / "a.txt").write_text(text.replace("line 1 ", "LINE 1 "))  # no longer and no shorter
    tokenize(task, tmp_path / "out")
    tokenize(task, tmp_path / "again")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "again")


def test_tokens_of_another_tokenizer_or_other_settings_are_refused(tmp_path):
    task = a_task(tmp_path)
    tokenize(task, tmp_path / "out")
    patterns = source_patterns(tmp_path / "out", task.section)
    with pytest.raises(InputError, match='made with data.bos = "auto", and not "never"'):
        opened(a_task(tmp_path, bos="never"), patterns)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match="another chat template"):
        opened(task, patterns)


def test_broken_files_of_tokens_are_one_line(tmp_path):
    task = a_task(tmp_path)
    out = tmp_path / "out"
    tokenize(task, out)
    patterns = source_patterns(out, task.section)
    index = json.loads((out / INDEX).read_text())
    [first, *_] = index["files"]
    index["files"][first]["records"] += 1
    (out / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"has \d+ records, .*tokens.json says \d+"):
        opened(task, patterns)
    del index["files"][first]
    (out / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match="does not list source-0-00000"):
        opened(task, patterns)
    (out / INDEX).unlink()
    with pytest.raises(InputError, match="has no tokens.json: files .* by moe-jax data tokenize"):
        opened(task, patterns)
    for record in (b"", b"\x03" + bytes(7), pack([Document(np.arange(9), np.ones(9))])[:-1]):
        with pytest.raises((ValueError, Exception)) as error:
            unpack(record)
        assert type(error.value).__name__ in ("ValueError", "error")


def test_what_cannot_be_tokenised_is_said(tmp_path):
    task = a_task(tmp_path)
    tokenize(task, tmp_path / "out")
    with pytest.raises(InputError, match="already exists"):
        tokenize(task, tmp_path / "out")
    with pytest.raises(InputError, match="processes = 0 must .* least 1"):
        tokenize(task, tmp_path / "new", processes=0)
    tokens = tuple(SourceSection(path=path) for path in source_patterns(tmp_path / "out", task.section))
    with pytest.raises(InputError, match="is tokenised already"):
        tokenize(task._replace(section=DataSection(sources=tokens)), tmp_path / "new")
    (tmp_path / "b.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(InputError, match="b.jsonl, line 1: expected"):
        tokenize(task, tmp_path / "new", processes=2)
    assert not (tmp_path / "new").exists() and not leftovers(tmp_path / "new")


def test_a_full_disk_is_an_os_error(tmp_path):
    """The writer of records says in words what the system said."""
    task = a_task(tmp_path)
    with small_disk(tmp_path / "disk", 1) as disk:
        (disk / "of others").write_bytes(bytes((1 << 20) - 8192))
        with pytest.raises(OSError, match="left on device") as raised:
            tokenize(task, disk / "out")
        assert raised.value.errno == errno.ENOSPC and not (disk / "out").exists()
        (disk / "of others").unlink()
        tokenize(task, disk / "out")
        assert not leftovers(disk / "out")
