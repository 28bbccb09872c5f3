"""Pieces of the demo; the whole of it is `make demo`."""

import json
import random
import re
import signal

import pytest
import rich.console

from moe_jax import demo
from moe_jax.commands.cli import main
from moe_jax.core.errors import InputError
from moe_jax.demo import shell
from moe_jax.demo.quick import Result, byte_tokenizer, median_speed, plot, table, write_text
from moe_jax.demo.real import KINDS, MODELS, QUESTIONS, Answers, Row, print_page, write_page, write_problems
from moe_jax.training.loop import Stopped
from tests.support.environment import ROOT
from tests.support.walkthroughs import blocks_of, form


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
    assert "demo; choose another --dir" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_of_an_earlier_demo_is_replaced(tmp_path):
    folder = tmp_path / "of" / "a demo"
    shell.make_folder(folder)
    (folder / "old.txt").touch()
    shell.make_folder(folder)
    assert [file.name for file in folder.iterdir()] == [shell.MARKER]
    (folder / shell.MARKER).unlink()
    with pytest.raises(InputError, match="another --dir"):
        shell.make_folder(folder)


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
    def stopped(recipe, *, continue_command):
        assert recipe.train.steps == 7 and continue_command == f"moe-jax train {tmp_path / 'd/dense.toml'} --resume"
        raise Stopped(number)

    monkeypatch.setattr(shell, "run_recipe", stopped)
    assert main(["demo", "--dir", str(tmp_path / "d"), "--quick", "--dense-steps", "7"]) == 128 + number
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"moe-jax: interrupted by {number.name}"]
    assert said.out.count("$ moe-jax") == 1 and not (tmp_path / "d/hf-dense").exists()


@pytest.fixture
def runs(tmp_path):
    for name, losses in {"dense": [5.0, 4.0], "ders-lm": [3.9, 3.8]}.items():
        (tmp_path / name).mkdir()
        lines = [
            {"step": i + 1, "loss": loss, "tokens_per_second": 10.0 * (i + 1), "eval_loss": loss}
            for i, loss in enumerate(losses)
        ]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def test_picture_and_table(runs):
    plot(runs / "curves.png", runs / "dense", {"ders-lm": runs / "ders-lm"})
    assert (runs / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert median_speed([{"tokens_per_second": x} for x in (1.0, 9.0, 2.0)]) == 2.0
    console = rich.console.Console(width=120, record=True)
    compared = table([Result("ders-lm", 864640, 93184, 9.5, 1234.0)], 49152)
    assert [column.justify for column in compared.columns] == ["left", *["right"] * 4]
    console.print(compared)
    text = console.export_text()
    assert "864,640" in text and "93,184" in text and "9.500" in text and "1,234" in text


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


def test_the_page_shows_what_was_said_and_measured(tmp_path):
    answers = [Answers("1 < 2?", "No & [bold]no[/bold]", "<b>yes</b>")]
    rows = [Row("tuned, ResMoE", 136_565_568, 211_000_000, 1.234, 512.0)]
    console = rich.console.Console(width=120, record=True)
    print_page(console, answers, rows)
    write_page(tmp_path / "page.html", answers, rows, [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0}], "model")
    page, printed = (tmp_path / "page.html").read_text(), console.export_text()
    for cell in ("136,565,568", "1.234", "512", "tuned, ResMoE"):
        assert cell in page and cell in printed
    assert "&lt;b&gt;yes&lt;/b&gt;" in page and "<b>yes" not in page
    assert "training loss from 2.500 at step 1 to 2.000 at step 2" in page and "data:image/svg+xml;base64," in page
    assert "[bold]no[/bold]" in printed and "<b>yes</b>" in printed


def test_a_quick_demo_takes_no_model(tmp_path, capsys):
    assert main(["demo", "--dir", str(tmp_path / "d"), "--quick", "--model", "x.gguf"]) == 2
    assert "--quick makes its own" in capsys.readouterr().err


def test_the_first_screen_of_the_readme_is_what_the_demo_ends_with():
    console = rich.console.Console(width=120, record=True)
    rows = [Row(name, 134_515_008, 269_000_000, 3.8, 60.0) for name in MODELS]
    print_page(console, [Answers(question, "this", "that") for question in QUESTIONS], rows)
    shown = next(block.text for block in blocks_of((ROOT / "README.md").read_text()) if block.kind == "text")

    def forms(text: str) -> list[str]:
        return [form(re.sub(r"^ +(before|now): .*", r"\1:", line)) for line in text.splitlines() if line.strip()]

    heading, *printed = forms(console.export_text())
    assert "what it said before" in heading and forms(shown) == printed
