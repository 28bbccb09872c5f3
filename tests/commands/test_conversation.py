"""`moe-jax generate --chat`, as a user talks to it."""

import dataclasses
import io
import json
import os
import pty
import subprocess
import sys

import pytest

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.core.interruptions import Interrupted
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.environment import ROOT

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def config():
    return dataclasses.replace(
        dense_config(num_layers=1, vocab_size=258, bos_id=BOS, eos_ids=(EOS,)), max_positions=256
    )


@pytest.fixture(scope="module")
def model(config, tmp_path_factory):
    """A random model over bytes whose tokenizer has a chat template, which writes BOS itself."""
    folder = tmp_path_factory.mktemp("chat")
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}))
    files = (byte_tokenizer(folder / "tokenizer.json", adds_bos=True), settings)
    return write_model(folder / "model", config, random_leaves(config), files)


def command(capsys, *arguments) -> str:
    assert cli.main(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def say(monkeypatch, capsys, model, lines: str, *options) -> str:
    """The answers to lines of standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert cli.main(["generate", str(model), "--chat", "--max-new-tokens", "6", *options]) == 0
    return capsys.readouterr().out


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_question_is_written_by_the_template(model, capsys):
    options = ("--max-new-tokens", 5, "--json")
    asked = json.loads(command(capsys, model, "--chat", "--system", "be", "--prompt", "hi", *options))[0]
    assert asked["prompt_ids"] == [BOS, *b"s:be\nu:hi\na:"]
    given = moe_jax.generate(model, [{"role": "system", "content": "be"}, user("hi")], max_new_tokens=5)
    assert given._asdict() == asked
    printed = command(capsys, model, "--chat", "--prompt", "hi", "--max-new-tokens", 5)
    assert printed == moe_jax.generate(model, [user("hi")], max_new_tokens=5).text + "\n"


def test_conversations_from_a_file(model, tmp_path, capsys):
    file = tmp_path / "some.jsonl"
    file.write_text(json.dumps({"messages": [user("a"), assistant("b"), user("c")]}) + '\n{"prompt": "d"}\n')
    entries = json.loads(command(capsys, model, "--prompts-file", file, "--json", "--max-new-tokens", 1))
    assert [entry["prompt_ids"] for entry in entries] == [[BOS, *b"u:a\na:b\nu:c\na:"], [BOS, *b"d"]]
    entries = json.loads(command(capsys, model, "--chat", "--prompts-file", file, "--json", "--max-new-tokens", 1))
    assert entries[1]["prompt_ids"] == [BOS, *b"u:d\na:"]
    how = ("--chat", "--system", "s", "--prompts-file", file, "--json", "--max-new-tokens", 1)
    entries = json.loads(command(capsys, model, *how))
    assert [entry["prompt_ids"][1:7] for entry in entries] == [[*b"s:s\nu:"]] * 2
    file.write_text('{"messages": [{"role": "usr", "content": "a"}]}')
    assert cli.main(["generate", str(model), "--prompts-file", str(file)]) == 2
    assert "some.jsonl, line 1: message 1 has the role 'usr' (did you mean 'user'?)" in capsys.readouterr().err


def test_lines_that_are_no_text_are_one_line(model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8", errors="strict"))
    assert cli.main(["generate", str(model), "--chat"]) == 2
    err = capsys.readouterr().err
    assert "not text in utf-8" in err and "Traceback" not in err


def test_answers_are_given_all_that_was_said_before(model, monkeypatch, capsys):
    options = dict(max_new_tokens=6)
    first = moe_jax.generate(model, [user("one")], **options).text
    second = moe_jax.generate(model, [user("one"), assistant(first), user("two")], **options).text
    alone = moe_jax.generate(model, [user("two")], **options).text
    assert second != alone
    assert say(monkeypatch, capsys, model, "one\n\n two \n") == f"{first}\n{second}\n"
    assert say(monkeypatch, capsys, model, "one\n/clear\ntwo\n/exit\none\n") == f"{first}\n{alone}\n"
    system = {"role": "system", "content": "s"}
    ruled = moe_jax.generate(model, [system, user("two")], **options).text
    said = say(monkeypatch, capsys, model, "one\n/clear\ntwo", "--system", "s")
    assert said.endswith(f"\n{ruled}\n")


def test_ctrl_c_ends_the_answer_and_another_signal_the_program(model, monkeypatch, capsys):
    from moe_jax.api import generate

    real, asked, signals = generate.continue_prompts, [], [KeyboardInterrupt(), None, Interrupted(15)]

    def interrupted(model, prompts, wanted, on_text, *, chat):
        asked.append(bytes(prompts[0][1:]))
        signal = signals.pop(0)
        if signal is None:
            return real(model, prompts, wanted, on_text)
        on_text(0, "half an")
        raise signal

    monkeypatch.setattr(generate, "continue_prompts", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\nfour\n"))
    assert cli.main(["generate", str(model), "--chat", "--max-new-tokens", "3"]) == 128 + 15
    out, err = capsys.readouterr()
    assert out.startswith("half an\n") and out.endswith("\nhalf an\n") and "moe-jax: ended by Ctrl-C" in err
    assert asked[1] == b"u:one\na:half an\nu:two\na:" and len(asked) == 3


def test_a_conversation_on_a_terminal(model):
    """With a prompt, and the commands told."""
    ours, theirs = pty.openpty()
    arguments = [
        sys.executable,
        "-m",
        "moe_jax.commands.cli",
        "generate",
        str(model),
        "--chat",
        "--max-new-tokens",
        "3",
    ]
    with subprocess.Popen(
        arguments, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True
    ) as run:
        os.close(theirs)
        seen = b""

        def until(text: bytes) -> None:
            nonlocal seen
            while text not in seen:
                seen += os.read(ours, 4096)

        try:
            until(b"> ")
            assert b"/exit ends" in seen
            os.write(ours, b"one\n")
            until(b"3 tokens in")
            os.write(ours, b"/exit\n")
            assert run.wait(60) == 0
        finally:
            run.kill()
            os.close(ours)


def test_a_prompt_that_ends_at_once_is_told_of_the_template(config, model, tmp_path, capsys):
    (tmp_path / "tokenizer_config.json").write_text((model / "tokenizer_config.json").read_text())
    files = (byte_tokenizer(tmp_path / "tokenizer.json"), tmp_path / "tokenizer_config.json")
    (first,) = moe_jax.generate(model, [[97]], max_new_tokens=1)[0].ids
    ends = dataclasses.replace(config, eos_ids=(first,))
    for name, kept in (("with", files), ("without", files[:1])):
        path = write_model(tmp_path / name, ends, random_leaves(ends), kept)
        assert cli.main(["generate", str(path), "--prompt", "a"]) == 0
        err = capsys.readouterr().err
        assert "ended at once" in err and ("something, add --chat" in err) == (name == "with")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--system", "s", "--prompt", "a"), "--system goes with --chat"),
        (("--chat", "--json"), "--json is for prompts"),
    ],
)
def test_options_that_do_not_go_together(options, message, model, capsys):
    assert cli.main(["generate", str(model), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_chat_template_is_told(config, tmp_path, capsys):
    files = (byte_tokenizer(tmp_path / "tokenizer.json"),)
    path = write_model(tmp_path / "model", config, random_leaves(config), files)
    for options in ((), ("--prompt", "a")):
        assert cli.main(["generate", str(path), "--chat", *options]) == 2
        err = capsys.readouterr().err
        assert "chat template" in err and err.count("\n") == 1


def test_pairs_are_scored_as_conversations_where_that_is_asked_for(model, tmp_path, capsys):
    pairs, chats = tmp_path / "pairs.jsonl", tmp_path / "chats.jsonl"
    pairs.write_text(json.dumps({"prompt": "one", "response": "two"}) + "\n")
    chats.write_text(json.dumps({"messages": [user("one"), assistant("two")]}) + "\n")
    asked = moe_jax.evaluate(model, pairs, apply_chat_template=True)
    assert asked == moe_jax.evaluate(model, chats) != moe_jax.evaluate(model, pairs)
    assert cli.main(["eval", str(model), "--text", str(pairs), "--apply-chat-template", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nll"] == asked.nll
    with pytest.raises(InputError, match="of a file"):
        moe_jax.evaluate(model, [("one", "two")], apply_chat_template=True)
    text = tmp_path / "text.txt"
    text.write_text("one two")
    for words in (["--text", str(text)], ["--classify", str(pairs)]):
        assert cli.main(["eval", str(model), *words, "--apply-chat-template"]) == 2
