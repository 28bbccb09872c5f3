"""Pieces of the demo; the whole of it is `make demo`."""

import io
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
from moe_jax.demo import quick, real, shell
from moe_jax.demo.comparison import score
from moe_jax.demo.folder import MARKER, open_folder
from moe_jax.demo.page import training_records
from moe_jax.demo.problems import KINDS, write_problems
from moe_jax.demo.questions import ask
from moe_jax.demo.quick import byte_tokenizer, write_text
from moe_jax.training.loop import Stopped
from moe_jax.training.recipe import load_recipe


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


@pytest.mark.parametrize("how", ["absent", "empty", "linked"])
def test_a_folder_of_an_earlier_demo_is_replaced(tmp_path, how):
    folder = tmp_path / "of" / "a demo"
    if how != "absent":
        (tmp_path / "real").mkdir()
        (tmp_path / "of").mkdir()
        folder.symlink_to(tmp_path / "real") if how == "linked" else folder.mkdir()
    with open_folder(folder, {}, resume=False):
        (folder / "old").mkdir()
        (folder / "old/link").symlink_to(tmp_path)
        (folder / "link").symlink_to(tmp_path)
    with open_folder(folder, {}, resume=False):
        pass
    assert [file.name for file in folder.iterdir()] == [MARKER]
    (folder / MARKER).rename(folder / "mine")
    with pytest.raises(InputError, match="another --dir"), open_folder(folder, {}, resume=False):
        pass


def test_a_kill_while_a_demo_is_replaced_leaves_a_folder_of_a_demo(tmp_path, monkeypatch):
    with open_folder(tmp_path / "d", {}, resume=False):
        (tmp_path / "d/dense").mkdir()
        (tmp_path / "d/moe").mkdir()

    def killed(path):
        path.rmdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("shutil.rmtree", killed)
        with open_folder(tmp_path / "d", {}, resume=False):
            pass
    # What is left is of the older demo: nothing of it may be taken for a step of this one.
    with pytest.raises(InputError, match="leave out --resume"), open_folder(tmp_path / "d", {}, resume=True):
        pass
    with open_folder(tmp_path / "d", {}, resume=False):
        assert [file.name for file in (tmp_path / "d").iterdir() if file.is_dir()] == []


def test_two_demos_do_not_share_a_folder(tmp_path):
    with open_folder(tmp_path / "d", {}, resume=False) as steps:
        steps.kept("score", lambda: 1, lambda kept: True)
        before = (tmp_path / "d" / MARKER).read_bytes()
        for resume in (False, True):
            with pytest.raises(InputError, match="process .* --dir"):
                with open_folder(tmp_path / "d", {}, resume=resume):
                    pass
        assert (tmp_path / "d" / MARKER).read_bytes() == before


def test_a_demo_that_goes_on_knows_what_is_done(tmp_path):
    folder, made = tmp_path / "d", []
    score = {"nll": 0.5}

    def make():
        made.append(1)
        return score

    with pytest.raises(KeyboardInterrupt), open_folder(folder, {"model": "m"}, resume=True) as steps:
        with steps.timed("tune"):
            assert steps.kept("score", make, lambda kept: True) == score
            raise KeyboardInterrupt
    before = steps.seconds["tune"]
    with open_folder(folder, {"model": "m"}, resume=True) as again, again.timed("tune"):
        assert again.kept("score", make, lambda kept: True) == score and made == [1]
        again.kept("score", make, lambda kept: False)
    assert made == [1, 1] and again.seconds["tune"] > before > 0


def test_a_demo_goes_on_with_its_own_options_alone(tmp_path):
    with open_folder(tmp_path / "d", {"model": "m", "tuning_steps": 3}, resume=False):
        pass
    with pytest.raises(InputError, match="other options") as refused:
        with open_folder(tmp_path / "d", {"model": "m", "tuning_steps": 4}, resume=True):
            pass
    assert "tuning_steps 3, now 4" in str(refused.value)


@pytest.mark.parametrize(
    "content",
    ["", "[" * 10**5, '{"settings": {}, "seconds": {"tune": "x"}, "kept": {}}',
     '{"settings": {}, "seconds": {"tune": NaN}, "kept": {}}', '{"settings": {}, "seconds": {}, "kept": [1]}'],
    ids=range(5),
)  # fmt: skip
def test_a_damaged_file_of_steps_is_an_error(tmp_path, content):
    with open_folder(tmp_path / "d", {}, resume=False):
        pass
    (tmp_path / "d" / MARKER).write_text(content)
    with pytest.raises(InputError, match="leave out --resume"), open_folder(tmp_path / "d", {}, resume=True):
        pass


@pytest.mark.parametrize("kept", [None, [1], {"nll": 1}, {"perplexity": "2", "nll": 1, "tokens": 3},
                                  {"perplexity": float("nan"), "nll": 1, "tokens": 3}])  # fmt: skip
def test_a_kept_score_or_answer_that_is_none_is_made_again(tmp_path, kept):
    printed = {"eval": '{"perplexity": 2.0, "nll": 0.7, "tokens": 9}', "generate": '[{"text": "yes"}]'}
    made = shell.Shell(rich.console.Console(quiet=True), lambda words: print(printed[words[0]]) or 0)
    with open_folder(tmp_path / "d", {}, resume=False) as steps:
        for name in ("score of m", "answers of m"):
            steps.kept(name, lambda: kept, lambda value: True)
        assert score(made, steps, "m", tmp_path, ())["nll"] == 0.7
        assert ask(made, steps, "m", tmp_path, ["who?"]) == ["yes"]


@pytest.mark.parametrize("lines", [None, "", '{"step": 1}', '{"step": 1, "loss": "x"}', "{"])
def test_a_training_without_losses_is_an_error(tmp_path, lines):
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines)
    with pytest.raises(InputError, match=r"metrics\.jsonl has no loss"):
        training_records(tmp_path)


def test_recipes_and_lines_of_a_folder_with_any_name(tmp_path):
    folder = tmp_path / "[bold]a\"b\\c {x} [/]#\n'd"
    folder.mkdir(parents=True)
    console = rich.console.Console(file=io.StringIO(), width=10**4)
    quick._write_inputs(folder, 3, 4, shell.Shell(console, main))
    dense, longer = (load_recipe(folder / name) for name in ("dense.toml", "continue.toml"))
    assert (dense.run_dir, dense.model.config) == (f"{folder}/runs/dense", f"{folder}/config.json")
    assert (longer.model.path, longer.eval.text) == (f"{folder}/dense", f"{folder}/text/held-out.txt")
    real._write_inputs(folder, 5)
    tuned = load_recipe(folder / "tune.toml")
    assert (tuned.run_dir, tuned.model.path, tuned.train.steps) == (f"{folder}/run", f"{folder}/moe", 5)
    shell.Shell(console, main).make(folder, "convert")
    assert f"{folder} is there" in console.file.getvalue()


@pytest.mark.parametrize("kind", ["text", "config", "folder", "model"])
def test_an_older_demo_is_kept_where_the_model_is_none(tmp_path, capsys, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    with open_folder(tmp_path / "d", {}, resume=False):
        (tmp_path / "d/page.html").write_text("precious")
    given = tmp_path / "given"
    if kind in ("folder", "model"):
        given.mkdir()
        (given / ("note.txt" if kind == "folder" else "config.json")).write_text('{"model_type": "llama"}')
    else:
        given.write_text("{}" if kind == "config" else "some text")
    assert main(["demo", "--dir", "d", "--model", str(given)]) == 2
    said = capsys.readouterr()
    assert str(given) in said.err and "goes on" not in said.err and said.out == ""
    assert (tmp_path / "d/page.html").read_text() == "precious"


def test_steps_below_one_are_refused(tmp_path, capsys):
    assert main(["demo", "--dir", str(tmp_path / "d"), "--more-steps", "0"]) == 2
    assert "--more-steps=0 must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("given", [["--quick", "--tuning-steps", "5"], ["--tuning-steps", "5"],
                                   ["--model", "m.gguf", "--more-steps", "5"]])  # fmt: skip
def test_steps_of_the_other_demo_are_refused(tmp_path, capsys, given):
    (tmp_path / "m.gguf").touch()
    given = [str(tmp_path / word) if word == "m.gguf" else word for word in given]
    assert main(["demo", "--dir", str(tmp_path / "d"), *given]) == 2
    assert re.search(r"--(tuning|more)-steps: only with(out)? --model", capsys.readouterr().err)


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
