"""`moe-jax data inspect` and `moe-jax data tokenize`, as a user types them."""

import json
import re

import pytest

from moe_jax.commands import cli
from tests.support.chat_templates import SYSTEM, TURNS, plain


@pytest.fixture
def chat(folder):
    """A recipe of a text and a conversation."""
    (folder / "my.jinja").write_text(plain("chatml"))
    rows = [{"messages": [SYSTEM, *TURNS[:4]]}, {"messages": TURNS[:2]}]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 20))
    recipe = (folder / "recipe.toml").read_text()
    sources = '[{ path = "text/*.txt", weight = 1 }, { path = "chat.jsonl", weight = 2.5 }]\nchat_template = "my.jinja"'
    (folder / "recipe.toml").write_text(recipe.replace('[{ path = "text/*.txt" }]', sources))
    return folder


def test_inspect_shows_what_is_scored_and_counts(chat, capsys):
    assert cli.main(["data", "inspect", "recipe.toml", "--examples", "1"]) == 0
    out = capsys.readouterr().out
    assert "--- text/*.txt: document 1 ---\n<s>⟦a: the 0th line says 0\n" in out
    assert "<|im_start|>system\nYou know sums.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n" in out
    assert "<|im_start|>assistant\n⟦It is 4.<|im_end|>⟧\n<|im_start|>user\n And\ntwice that? <|im_end|>\n" in out
    assert "assistant\n⟦8, and here is a\nsecond line.<|im_end|>⟧\n" in out
    assert "too long: longer than data.seq_len = 16" in out
    [row] = [line for line in out.splitlines() if "chat.jsonl" in line and "│" in line]
    assert [cell.strip() for cell in row.split("│")[1:4]] == ["chat.jsonl", "jsonl", "40"]
    assert cli.main(["data", "inspect", "recipe.toml", "--examples", "0"]) == 0
    assert "document 1" not in capsys.readouterr().out


def test_inspect_counts_what_it_does_not_show(chat, capsys):
    sizes = (1_997, 2_000, 9_000)  # and the BOS
    (chat / "long.jsonl").write_text("\n".join(json.dumps({"text": "b" * size}) for size in sizes))
    recipe = (chat / "recipe.toml").read_text()
    (chat / "recipe.toml").write_text(recipe.replace("text/*.txt", "long.jsonl").replace("weight = 2.5", "weight = 1"))
    assert cli.main(["data", "inspect", "recipe.toml", "--examples", "3"]) == 0
    hidden = r"\.\.\. and ([\d,]+) characters"
    assert re.findall(hidden, capsys.readouterr().out) == ["3", "7,003"]
    turns = [{"role": "user", "content": "Q" * 1_500}, {"role": "assistant", "content": "Z" * 1_500}]
    (chat / "chat.jsonl").write_text(json.dumps({"messages": turns}))
    assert cli.main(["data", "inspect", "recipe.toml", "--examples", "1"]) == 0
    *_, conversation = capsys.readouterr().out.split("--- chat.jsonl")
    [rest] = re.findall(hidden, conversation)
    assert conversation.count("Q") == 1_500
    assert conversation.count("Z") + int(rest.replace(",", "")) == 1_500 + len("<|im_end|>\n")


def test_inspect_on_a_terminal_has_what_is_scored_in_green(chat, capsys, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli.main(["data", "inspect", "recipe.toml", "--examples", "1"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[32mIt is 4.<|im_end|>" in out and "\x1b[2m<|im_start|>system" in out and "⟦" not in out


def test_inspect_in_json_has_all_tokens_once(chat, capsys):
    assert cli.main(["data", "inspect", "recipe.toml", "--json", "--set", "data.seq_len=400"]) == 0
    text, conversations = json.loads(capsys.readouterr().out)
    assert conversations["records"] == conversations["counted_records"] == conversations["documents"] == 40
    assert conversations["estimated_tokens"] == conversations["tokens"] and conversations["too_long"] == 0
    scored = [part["text"] for part in conversations["shown"][0] if part["scored"]]
    assert scored == ["It is 4.<|im_end|>", "8, and here is a\nsecond line.<|im_end|>"]
    assert len("".join(part["text"] for part in conversations["shown"][0])) == conversations["longest"]
    assert text["form"] == "text" and len(conversations["shown"]) == 3


def test_tokenize_writes_what_it_says_one_can_train_on(chat, capsys):
    assert cli.main(["data", "tokenize", "recipe.toml", "tokens"]) == 0
    out = capsys.readouterr().out
    assert "chat.jsonl: " in out and "40 documents" in out and "wrote tokens; train on it with\n\n[data]\n" in out
    sources = out.splitlines()[-1].replace(" = ", "=", 1)
    assert sources.startswith("sources=") and "weight = 2.5" in sources
    trained = []
    for run_dir, given in (("on-text", []), ("on-tokens", [f"data.{sources}"])):
        assert cli.main(["train", "recipe.toml", "--set", f"run_dir={run_dir}", *given]) == 0
        lines = (chat / run_dir / "metrics.jsonl").read_text().splitlines()
        trained.append([json.loads(line)["loss"] for line in lines])
    assert trained[0] == trained[1] and len(trained[0]) == 4


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["inspect", "recipe.toml", "out"], "data inspect RECIPE.toml writes nothing"),
        (["tokenize", "recipe.toml"], "data tokenize RECIPE.toml OUT writes to OUT"),
        (["tokenize", "recipe.toml", "model"], "model already exists"),
        (["tokenize", "recipe.toml", "out", "--processes", "0"], "processes = 0 must be at least 1"),
        (["inspect", "recipe.toml", "--examples", "-1"], "number from 0"),
        (["inspekt", "recipe.toml"], "(did you mean 'inspect'?)"),
        (["inspect", "none.toml"], "no recipe at none.toml"),
    ],
)
def test_mistakes_are_one_line(chat, capsys, arguments, complaint):
    assert cli.main(["data", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moe-jax: error: ") and complaint in err and err.count("\n") == 1
    assert not (chat / "out").exists()
