"""Mistakes in a recipe's data: said in one line, before the model is built and before any table."""

import json
import shutil

import pytest

from moe_jax.commands import cli
from moe_jax.training import training_run as run_module

GOOD = '{"prompt": "Who is it?", "response": "It is a little dog that runs in the park all day."}\n' * 30
FILES = {
    "good.jsonl": GOOD,
    "empty.jsonl": "",
    "blank.jsonl": "\n\n",
    "keys.jsonl": '{"question": "a", "answer": "b"}\n',
    "broken.jsonl": GOOD[: GOOD.index("\n") + 1] * 2 + '{"prompt": "oops\n',
    "list.jsonl": "[1]\n",
    "short.txt": "hello",
    "latin.txt": b"caf\xe9 " * 100,
    "broken.parquet": b"PAR1 and no more",
    "broken.jsonl.gz": b"\x1f\x8b no",
    "tokenizer/tokenizer.json": '{"a": 1}',
}
RECIPE = """
run_dir = "run"
[model]
path = "model"
[data]
seq_len = 64
sources = [{ path = "good.jsonl" }]
[train]
steps = 1
batch_size = 8
[mesh]
fsdp = -1
"""


@pytest.fixture(scope="module")
def folder(data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(data_dir / "weights" / "stories260K" / "hf", folder / "model")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


def source(path: str, more: str = "") -> str:
    return f'data.sources=[{{path="{path}"{more}}}]'


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (source("absent.jsonl"), "no file matches absent.jsonl"),
        (source("empty.jsonl"), "empty.jsonl holds no text"),
        (source("blank.jsonl"), "blank.jsonl holds no text"),
        (source("keys.jsonl"), 'keys.jsonl, line 1: expected {"text"'),
        (source("keys.jsonl"), "'question', 'answer'; a source's fields"),
        (source("keys.jsonl", ', fields={text="body"}'), "with the keys 'question', 'answer'"),
        (source("broken.jsonl"), "broken.jsonl, line 3: "),
        (source("broken.jsonl"), "a line that is not valid JSON: Invalid control character at column 17"),
        (source("list.jsonl"), "list.jsonl, entry 1: expected"),
        (source("short.txt"), "short.txt is too short"),
        (source("latin.txt"), "latin.txt is not UTF-8 text at byte 3"),
        (source("broken.parquet"), "broken.parquet is not a"),
        (source("broken.jsonl.gz"), "broken.jsonl.gz is not a whole gzip file"),
        ("data.tokenizer=tokenizer/tokenizer.json", "tokenizer.json is not a tokenizer.json"),
        ("data.tokenizer=absent/tokenizer.json", "no tokenizer at absent/tokenizer.json"),
        ('eval={text="absent.txt"}', "no text at absent.txt"),
        ('eval={text="latin.txt"}', "latin.txt is not UTF-8 text at byte 3"),
    ],
)
def test_a_mistake_is_said_in_one_line_before_the_model_is_built(override, message, folder, monkeypatch, capsys):
    def build(*arguments):
        raise AssertionError("the model was built")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(run_module, "make_program", build)
    assert cli.main(["train", "recipe.toml", "--set", override]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert not (folder / "run").exists()


def test_another_models_tokenizer_and_a_length_beyond_the_context_are_noted(folder, data_dir, monkeypatch, capsys):
    class Built(Exception):
        pass

    monkeypatch.chdir(folder)
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "large.json").write_text(json.dumps(config | {"vocab_size": 2000, "max_position_embeddings": 8}))
    recipe = RECIPE.replace('path = "model"', 'config = "large.json"\ninit = "random"')
    (folder / "large.toml").write_text(recipe.replace("[data]", '[data]\ntokenizer = "model/tokenizer.json"'))

    def begin(*arguments, **options):
        raise Built

    monkeypatch.setattr(run_module, "make_record", begin)
    with pytest.raises(Built):
        cli.main(["train", "large.toml"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "knows 512 tokens, the model's vocabulary has 2,000: is it this model's?" in printed
    assert "the model was made for 8 positions" in printed
