"""Pieces of the demo; the whole of it is `make demo`."""

import json
import random
import re
import signal
import sys

import pytest
import rich.console

from moe_jax import demo
from moe_jax.commands.cli import main
from moe_jax.commands.demo import Options, command_again
from moe_jax.core.errors import InputError
from moe_jax.core.interruptions import Interrupted
from moe_jax.demo import shell
from moe_jax.demo.folder import MARKER, open_folder
from moe_jax.demo.problems import KINDS, write_problems
from moe_jax.demo.quick import byte_tokenizer, write_text
from moe_jax.training.loop import Stopped


def test_text_is_split_by_file(tmp_path):
    trained, held_out = write_text(tmp_path / "text", 20_000)
    files = list((tmp_path / "text" / "train").glob("*.txt"))
    assert len(files) > 50
    assert sum(file.stat().st_size for file in files) == trained
    assert (tmp_path / "text" / "held-out.txt").stat().st_size == held_out >= 20_000
    held_out_text = (tmp_path / "text" / "held-out.txt").read_text()
    assert not any(file.read_text() in held_out_text for file in files if file.stat().st_size > 500)


def test_byte_tokenizer_gives_one_token_per_byte_and_back():
    tokenizer, text = byte_tokenizer(), "def é():\n\treturn '→'\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) == len(text.encode()) and len(set(ids)) <= 256
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text).ids == [0, *ids]
    assert tokenizer.get_vocab_size() == 258


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["demo", "--dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "demo; choose another --dir" in said and "goes on" not in said
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_of_an_earlier_demo_is_replaced(tmp_path):
    folder = tmp_path / "of" / "a demo"
    open_folder(folder, {}, resume=False)
    (folder / "old.txt").touch()
    open_folder(folder, {}, resume=False)
    assert [file.name for file in folder.iterdir()] == [MARKER]
    (folder / MARKER).unlink()
    with pytest.raises(InputError, match="another --dir"):
        open_folder(folder, {}, resume=False)


def test_a_demo_that_goes_on_knows_what_is_done(tmp_path):
    folder, made = tmp_path / "d", []
    steps = open_folder(folder, {"model": "m"}, resume=True)
    with pytest.raises(KeyboardInterrupt), steps.timed("tune"):
        assert steps.kept("score", lambda: made.append(1) or {"nll": 0.5}) == {"nll": 0.5}
        raise KeyboardInterrupt
    before = steps.seconds["tune"]
    again = open_folder(folder, {"model": "m"}, resume=True)
    with again.timed("tune"):
        assert again.kept("score", lambda: made.append(1)) == {"nll": 0.5}
    assert made == [1] and again.seconds["tune"] > before > 0


def test_a_demo_goes_on_with_its_own_options_alone(tmp_path):
    open_folder(tmp_path / "d", {"model": "m", "tuning_steps": 3}, resume=False)
    with pytest.raises(InputError, match="other options") as refused:
        open_folder(tmp_path / "d", {"model": "m", "tuning_steps": 4}, resume=True)
    assert "tuning_steps 3, now 4" in str(refused.value)
    (tmp_path / "d" / MARKER).write_text("")  # as before demos could go on
    with pytest.raises(InputError, match="another version"):
        open_folder(tmp_path / "d", {}, resume=True)


def test_steps_below_one_are_refused(tmp_path, capsys):
    assert main(["demo", "--dir", str(tmp_path / "d"), "--more-steps", "0"]) == 2
    assert "steps must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_a_model_gets_the_demo_on_a_real_one(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(demo, "run_real_demo", lambda *places, steps, shell: called.append((*places, steps, shell)))
    (tmp_path / "m.gguf").touch()
    assert main(["demo", "--dir", str(tmp_path / "d"), "--model", str(tmp_path / "m.gguf"), "--tuning-steps", "3"]) == 0
    [(folder, model, steps, its_shell)] = called
    assert (folder, model, steps) == (tmp_path / "d", tmp_path / "m.gguf", 3) and isinstance(its_shell, shell.Shell)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_ends_a_training_ends_the_demo(tmp_path, capsys, monkeypatch, number):
    again = f"moe-jax demo --quick --dir {tmp_path / 'd'} --dense-steps 7 --resume"

    def stopped(recipe, *, resume, continue_command):
        assert recipe.train.steps == 7 and not resume and continue_command == again
        raise Stopped(number)

    monkeypatch.setattr(shell, "run_recipe", stopped)
    assert main(["demo", "--dir", str(tmp_path / "d"), "--quick", "--dense-steps", "7"]) == 128 + number
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"moe-jax: interrupted by {number.name}; the demo goes on with: {again}"]
    assert said.out.count("$ moe-jax") == 1 and not (tmp_path / "d/hf-dense").exists()


def test_a_demo_that_goes_on_resumes_the_training(tmp_path, monkeypatch):
    recipe, resumed = tmp_path / "r.toml", []
    recipe.write_text(f'run_dir = "{tmp_path}/run"\n[model]\npath = "m"\n[data]\nsources = []\n[train]\nsteps = 1\n')
    monkeypatch.setattr(shell, "load_recipe", lambda *given: None)
    monkeypatch.setattr(shell, "run_recipe", lambda recipe, *, resume, continue_command: resumed.append(resume))
    console = rich.console.Console(quiet=True)
    for resume in (False, True):
        made = shell.Shell(console, main, resume=resume)
        made.train(recipe, tmp_path / "run")
        (tmp_path / "run").mkdir(exist_ok=True)
    assert resumed == [False, True]
    (tmp_path / "run/model").mkdir()
    made.train(recipe, tmp_path / "run")
    assert len(resumed) == 2


def test_what_is_there_is_not_made_again(tmp_path):
    ran = []
    made = shell.Shell(rich.console.Console(quiet=True), lambda words: ran.append(words) or 0)
    made.make(tmp_path / "out", "convert", "in", tmp_path / "out")
    (tmp_path / "out").mkdir()
    made.make(tmp_path / "out", "convert", "in", tmp_path / "out")
    assert ran == [["convert", "in", str(tmp_path / "out")]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_command_ends_the_demo_with_how_it_goes_on(tmp_path, capsys, monkeypatch, number):
    def interrupted(folder, model, *, steps, shell):
        with shell.notes():
            shell.make(folder / "small", "compress", "a", "b")

    def raises(arguments, modules=()):
        if arguments[0] == "demo":
            return run_command(arguments, modules)
        raise Interrupted(number)

    cli = sys.modules["moe_jax.commands.cli"]
    run_command = cli.run_command
    monkeypatch.setattr(cli, "run_command", raises)
    monkeypatch.setattr(demo, "run_real_demo", interrupted)
    (tmp_path / "m.gguf").touch()
    given = ["demo", "--model", str(tmp_path / "m.gguf"), "--dir", str(tmp_path / "d")]
    assert main(given) == 128 + number
    again = f"moe-jax {' '.join(given)} --resume"
    said = capsys.readouterr().err.splitlines()
    assert said == [f"moe-jax: interrupted by {number.name}; the demo goes on with: {again}"]


def test_a_command_that_is_not_found_is_named_by_its_path(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "argv", [".venv/bin/moe-jax", "demo"])
    options = Options(model=tmp_path / "a b.gguf")
    assert command_again(options) == f".venv/bin/moe-jax demo --model '{tmp_path}/a b.gguf' --resume"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.strip("_"))
def test_every_equation_of_an_answer_is_true(kind):
    draw = random.Random(3)
    for _ in range(200):
        _, answer = kind(draw)
        said, _, result = answer.partition("\n#### ")
        equations = re.findall(r"(\d+) ([-+*/]) (\d+) = \$?(\d+)", said)
        assert len(equations) == 2 and int(result) == int(equations[-1][3]) >= 0
        for left, sign, right, equal in equations:
            a, b = int(left), int(right)
            assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign] == int(equal)


def test_no_problem_is_learnt_and_held_out(tmp_path):
    write_problems(tmp_path, train=50, held_out=10)
    learnt, held_out = (
        [json.loads(line)["messages"][0]["content"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held-out")
    )
    assert (len(set(learnt)), len(set(held_out))) == (50, 10) and not set(learnt) & set(held_out)


def test_a_quick_demo_takes_no_model(tmp_path, capsys):
    assert main(["demo", "--dir", str(tmp_path / "d"), "--quick", "--model", "x.gguf"]) == 2
    assert "--quick makes its own" in capsys.readouterr().err
