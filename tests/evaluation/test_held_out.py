"""What models are evaluated on may have every form that training data has."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from flax import nnx

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.bad_documents import STOP, BadDocument, Skipped
from moe_jax.core.errors import InputError
from moe_jax.data.sections import DataSection, FieldsSection, SourceSection
from moe_jax.data.tokenizer import Pair, Tokenizer
from moe_jax.evaluation.held_out import Evaluator, read_held_out
from moe_jax.training.recipe import EvalSection
from tests.support.chat_templates import plain

TEXTS = ["Once upon a time there was a dog.", "He ran in the park, and then he slept all day."]
PAIRS = [("Who is it?", " A dog."), ("Where is it?", " In the park.")]
CHATS = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer.strip()}]
    for question, answer in PAIRS
]
DATA = DataSection(seq_len=16)


@pytest.fixture(scope="module")
def model(data_dir):
    return data_dir / "weights" / "stories260K" / "hf"


@pytest.fixture(scope="module")
def config(model):
    return moe_jax.load(model).config


def lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def same(found, expected) -> bool:
    return len(found) == len(expected) and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for one, other in zip(found, expected, strict=True)
        for name in ("tokens", "targets", "weights")
    )


@pytest.fixture
def read(tmp_path, model, config):
    def read(name: str, content: bytes | None, data: DataSection = DATA, skipped: Skipped = STOP, **settings):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        source = SourceSection(path=str(tmp_path / name), **settings)
        return read_held_out(source, data, config, model / "tokenizer.json", skipped)

    return read


def test_every_form_of_the_same_rows_gives_the_same(read, tmp_path):
    rows = [{"prompt": prompt, "response": response} for prompt, response in PAIRS]
    expected = read("a.jsonl", lines(rows))
    assert len(expected) == 2 and all(0 < pair.weights.sum() < len(pair.weights) for pair in expected)
    assert same(read("b.jsonl.gz", gzip.compress(lines(rows))), expected)
    table = pyarrow.table({"q": [a for a, _ in PAIRS], "a": [b for _, b in PAIRS]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    pyarrow.feather.write_feather(table, tmp_path / "d.arrow")
    fields = FieldsSection(prompt="q", response="a")
    for name in ("c.parquet", "d.arrow"):
        assert same(read(name, None, fields=fields), expected)
    assert same(read("[ab].jsonl*", None, format="jsonl"), [*expected, *expected])


def test_a_document_is_cut_into_rows_in_which_every_token_but_its_first_is_scored(read, model, config):
    rows = read("a.jsonl", lines({"text": text} for text in TEXTS))
    assert max(len(row.tokens) for row in rows) == DATA.seq_len and all(row.weights.all() for row in rows)
    tokenizer = Tokenizer(model / "tokenizer.json", config)
    expected = [tokenizer.prompt(text).tolist()[1:] for text in TEXTS]
    assert [token for row in rows for token in row.targets.tolist()] == sum(expected, [])
    assert same(read("a.txt", "\n\n".join(TEXTS).encode(), separator="\n\n"), rows)


def test_a_text_is_one_text_whether_it_is_compressed_or_not(read):
    content = " ".join(TEXTS).encode()
    ids = read("a.txt", content)
    assert isinstance(ids, np.ndarray) and np.array_equal(ids, read("b.txt.gz", gzip.compress(content)))


def test_conversations_are_written_with_the_template(read, tmp_path):
    (tmp_path / "my.jinja").write_text(plain("chatml"))
    data = DataSection(seq_len=256, chat_template=str(tmp_path / "my.jinja"))
    chats = read("a.jsonl", lines({"messages": chat} for chat in CHATS), data)
    assert len(chats) == 2 and all(0 < pair.weights.sum() < len(pair.weights) for pair in chats)
    pairs = lines({"prompt": chat[0]["content"], "response": chat[1]["content"]} for chat in CHATS)
    assert same(read("b.jsonl", pairs, data, chat=True), chats)


def test_bad_rows_of_every_form_are_skipped_and_named(read, tmp_path):
    rows = [{"prompt": prompt, "response": response} for prompt, response in PAIRS]
    nothing, half = {"prompt": "Who?", "response": None}, {"prompt": "Who?", "response": "\ud83d"}
    expected = read("a.jsonl", lines(rows))
    tables = {name: [row[name] for row in [nothing, *rows]] for name in nothing}
    pyarrow.parquet.write_table(pyarrow.table(tables), tmp_path / "b.parquet")
    (tmp_path / "c.json").write_text(json.dumps([*rows, nothing]))
    for name, content, places in (
        ("a.jsonl", lines([nothing, rows[0], half, rows[1], {"prompt": "Who?"}]) + b"{\n", "line 1,3,5,6"),
        ("b.parquet", None, "row 1"),
        ("c.json", None, "entry 3"),
    ):
        skipped = Skipped("skip")
        assert same(read(name, content, skipped=skipped), expected)
        unit, numbers = places.split()
        wanted = [f"{tmp_path / name}, {unit} {number}: " for number in numbers.split(",")]
        assert skipped.count == len(wanted)
        assert all(map(str.startswith, skipped.problems, wanted))
        with pytest.raises(BadDocument, match=f"{unit} {numbers[0]}: "):
            read(name, None)
    with pytest.raises(InputError, match="all 2 documents are bad"):
        read("a.jsonl", lines([nothing] * 2), skipped=Skipped("skip"))


def test_an_answer_that_is_cut_away_is_counted(read, tmp_path):
    (tmp_path / "my.jinja").write_text(plain("chatml"))
    chat = [*CHATS[0], {"role": "user", "content": "Why? " * 20}]
    data = DataSection(seq_len=16, chat_template=str(tmp_path / "my.jinja"))
    (row,) = read("a.jsonl", lines([{"messages": chat}]), data)
    assert row.target_was_cut and not row.weights.any()


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (b"\n", {}, "documents to score"),
        (b'{"body": "a"}\n', {}, "line 1: expected"),
        (b'{"text": "a"}\n', {"format": "parquet"}, "file of parquet"),
    ],
)
def test_files_that_cannot_be_scored(read, content, settings, message):
    with pytest.raises(InputError, match=message):
        read("a.jsonl", content, **settings)


def test_the_section_of_a_recipe_has_the_rules_of_a_source():
    with pytest.raises(InputError, match="fields and chat"):
        EvalSection(text="a.txt", chat=True)
    fields = FieldsSection(text="body")
    assert EvalSection(text="a.jsonl", fields=fields).source == SourceSection(path="a.jsonl", fields=fields)


RECIPE = """
run_dir = "run"
[model]
path = "{model}"
[data]
seq_len = 16
sources = [{{ path = "train.jsonl", fields = {{ text = "body" }} }}]
[train]
steps = 1
batch_size = 8
[optimizer]
learning_rate = 1e-30
[eval]
text = "tokens/*.array_record"
[log]
tensorboard = false
"""


def test_a_run_is_evaluated_on_tokens_and_the_command_says_the_same_of_their_source(
    tmp_path, model, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_bytes(lines({"body": text} for text in TEXTS * 40))
    (tmp_path / "held_out.jsonl").write_bytes(lines({"text": text} for text in TEXTS))
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=model))
    held_out = ["--set", 'data.sources=[{path="held_out.jsonl"}]']
    assert cli.main(["data", "tokenize", "recipe.toml", "tokens", *held_out]) == 0
    assert cli.main(["train", "recipe.toml"]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last, before = records[-1], records[0]["eval_loss_before"]
    assert f"held-out loss before training: {before:.4f}\n" in capsys.readouterr().out
    (tmp_path / "held_out.jsonl").write_bytes(lines([{"text": 1}, *({"text": text} for text in TEXTS), ["b"]]))
    options = ["eval", str(model), "--text", "held_out.jsonl", "--seq-len", "16", "--json"]
    assert cli.main([*options, "--bad-documents", "skip"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["nll"] == pytest.approx(last["eval_loss"], rel=1e-5) and found["skipped"] == 2
    assert found["nll"] == pytest.approx(before, rel=1e-5)
    assert all(one in printed.err for one in found["problems"]) and "line 4: expected" in found["problems"][1]
    assert cli.main(options) == 2
    assert "held_out.jsonl, line 1: expected" in capsys.readouterr().err


def test_pairs_of_which_nothing_is_scored_are_an_error():
    nothing = Pair(np.array([1, 2], np.int32), np.array([2, 3], np.int32), np.zeros(2, np.float32))
    with pytest.raises(InputError, match="no token of 2 pairs is scored"):
        Evaluator(nnx.graphdef(moe_jax.tiny_model().decoder), [nothing] * 2, batch_size=1)


def test_pairs_of_a_list_are_named_by_their_number_and_the_choice_is_one_of_two(model):
    pairs = [PAIRS[0], ("Who?", "\ud83d")]
    with pytest.raises(BadDocument, match="^pair 2: "):
        moe_jax.evaluate(model, pairs)
    with pytest.raises(InputError, match="all 1 documents are bad"):
        moe_jax.evaluate(model, pairs[1:], bad_documents="skip")
    with pytest.raises(InputError, match="known: stop, skip"):
        moe_jax.evaluate(model, pairs, bad_documents="drop")
