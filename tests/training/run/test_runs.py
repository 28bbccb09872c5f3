"""Whole runs through the command line: killed, stopped, diverged, continued, moved to other devices."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from moe_jax.api import train as api_train
from moe_jax.commands import cli
from moe_jax.models import FFNConfig
from moe_jax.training import loop
from moe_jax.training.loop import StopSignals
from tests.support.disks import small_disk
from tests.support.environment import COMPILER_FLAGS, ROOT
from tests.support.forked import OF_COMMANDS, start
from tests.support.tiers import long, one_in
from tests.support.training_models import config_of, moe, write_config

usage = namedtuple("usage", ("total", "used", "free"))
STEPS = 30
RECIPE = """
run_dir = "run"
[model]
config = "config.json"
init = "random"
[data]
tokenizer = "{tokenizer}"
seq_len = 16
[[data.sources]]
path = "text.txt"
[partition]
freeze = ["layers/0/attention/.*"]
[optimizer]
learning_rate = 4e-3
[schedule]
warmup_steps = 3
[train]
steps = {steps}
batch_size = 8
[checkpoint]
every = 10
[eval]
text = "held_out.txt"
every = 12
"""

UNDISTURBED = "undisturbed[b]"  # which is no markup


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tokenizer_path) -> Path:
    """A directory with a recipe and what it needs."""
    folder = tmp_path_factory.mktemp("runs")
    write_config(folder / "config.json", config_of(moe(expert=FFNConfig(dim=16, gated=False))))
    lines = [f"the {i}th line says {i * i} and {i % 7}\n" for i in range(600)]
    (folder / "text.txt").write_text("".join(lines))
    (folder / "held_out.txt").write_text("".join(lines[:20]))
    (folder / "recipe.toml").write_text(RECIPE.format(tokenizer=tokenizer_path, steps=STEPS))
    return folder


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "moe_jax.commands.cli", "train", "recipe.toml", *arguments]


def environment(devices: int = 8) -> dict[str, str]:
    flags = f"{COMPILER_FLAGS} --xla_force_host_platform_device_count={devices}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


def train(folder: Path, *arguments: str) -> str:
    """A run in this process, which must go well; returns what it prints."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        assert cli.main(["train", "recipe.toml", *arguments]) == 0
    return printed.getvalue()


def train_alone(folder: Path, *arguments: str) -> str:
    """A run in a process of one device."""
    environment_of_one = environment(devices=1)
    done = subprocess.run(
        command(*arguments), cwd=folder, env=environment_of_one, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train_until(folder: Path, run_dir: str, step: int, number: int, *arguments: str) -> tuple[int, str]:
    """Starts a run and sends it a signal once metrics.jsonl has the given step; returns exit code and output."""
    process = start(
        command(*arguments),
        imports=OF_COMMANDS,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if len(read_lines(folder / run_dir / "metrics.jsonl")) >= step:
            process.send_signal(number)
            break
        time.sleep(0.002)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def metrics(folder: Path, run_dir: str) -> list[dict]:
    return [json.loads(line) for line in read_lines(folder / run_dir / "metrics.jsonl")]


def losses(records: list[dict]) -> list[tuple]:
    return [(record["step"], record["loss"], record["aux_loss"], record["grad_norm"]) for record in records]


@pytest.fixture(scope="module")
def undisturbed(workplace) -> list[dict]:
    """The metrics of a run from beginning to end."""
    printed = train(workplace, "--set", f"run_dir={UNDISTURBED}")
    assert f"wrote {UNDISTURBED}/model" in printed
    assert re.search(r"trained: [\d,]+ of [\d,]+ parameters", printed)
    assert "the router is among them: yes" in printed
    return metrics(workplace, UNDISTURBED)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_every_signal_asks_to_stop_after_the_step_and_the_second_one_has_its_usual_effect(number):
    before, said, heard = signal.getsignal(number), [], threading.Event()
    with StopSignals(lambda name: (said.append(name), heard.set())) as signals:
        assert not signals.stop_after(1)
        os.kill(os.getpid(), number)
        assert signals.stop_after(2) and signals.received == number and signal.getsignal(number) is before
        assert heard.wait(60) and said == [signal.Signals(number).name]
    assert signal.getsignal(number) is before


def test_a_run_leaves_metrics_of_every_step_and_a_model(workplace, undisturbed):
    assert [record["step"] for record in undisturbed] == list(range(1, STEPS + 1))
    record = undisturbed[-1]
    assert record["loss"] < undisturbed[0]["loss"] - 0.5
    keys = {"aux_loss", "balance_loss", "z_loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second"}
    assert keys | {"flops_per_second", "dropped"} <= record.keys()
    assert list(record["expert_load"]) == ["0"]
    assert sum(record["expert_load"]["0"]) == pytest.approx(1, abs=1e-4)
    assert [record["step"] for record in undisturbed if "eval_loss" in record] == [12, 24, 30]
    assert [record["step"] for record in undisturbed if "eval_loss_before" in record] == [1]
    assert undisturbed[0]["eval_loss_before"] > record["eval_loss"]
    run = workplace / UNDISTURBED
    made = {path.name for path in run.iterdir()}
    assert made == {"recipe.toml", "run.json", "tokenizer", "checkpoints", "metrics.jsonl", "tensorboard", "model"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"20", "30"}
    assert any(path.name.startswith("events") for path in (run / "tensorboard").iterdir())
    lineage = json.loads((run / "model" / "lineage.json").read_text())
    assert [entry["command"] for entry in lineage] == ["train"]
    assert lineage[0]["measured"]["steps"] == STEPS
    assert lineage[0]["measured"]["eval_loss"] == record["eval_loss"]
    assert (run / "model" / "tokenizer.json").is_file()


def test_killed_in_the_middle_and_resumed_it_gives_the_same_curve_to_the_last_bit(workplace, undisturbed):
    arguments = ("--set", "run_dir=killed")
    code, output = train_until(workplace, "killed", 17, signal.SIGKILL, *arguments)
    assert code == -signal.SIGKILL, output
    assert 17 <= len(read_lines(workplace / "killed" / "metrics.jsonl")) < STEPS
    # A kill may also leave half a line.
    with (workplace / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')
    code, output = train_until(workplace, "killed", 23, signal.SIGTERM, *arguments, "--resume")
    assert code == 128 + signal.SIGTERM, output
    stopped = re.search(r"SIGTERM: step (\d+) of 30 is saved; continue with: (.*)", output)
    assert stopped and 23 <= int(stopped[1]) < STEPS
    assert output.count("SIGTERM: saving a checkpoint after this step; a second SIGTERM ends the run at once") == 1
    assert stopped[2] == "moe-jax train recipe.toml --set run_dir=killed --resume"
    assert not (workplace / "killed" / "model").exists()
    assert f"continuing after step {stopped[1]}" in train(workplace, *arguments, "--resume")
    resumed = metrics(workplace, "killed")
    assert losses(resumed) == losses(undisturbed)
    assert [r["eval_loss"] for r in resumed if "eval_loss" in r] == [
        r["eval_loss"] for r in undisturbed if "eval_loss" in r
    ]
    before = [[r["eval_loss_before"] for r in run if "eval_loss_before" in r] for run in (resumed, undisturbed)]
    assert before[0] == before[1] and len(before[0]) == 1


@long  # `test_checkpoint.py` has a state that moves
def test_a_run_moves_from_8_devices_to_1(workplace, undisturbed):
    arguments = ("--set", "run_dir=moved", "schedule.kind=constant", "train.steps=10")
    train(workplace, *arguments, "mesh.fsdp=4", "mesh.expert=2")
    assert "continuing after step 10" in train_alone(workplace, *arguments, "train.steps=15", "--resume")
    moved = metrics(workplace, "moved")
    assert [record["step"] for record in moved] == list(range(1, 16))
    # While the learning rate warms up, and a little longer, both runs are the same.
    np.testing.assert_allclose([r["loss"] for r in moved[:4]], [r["loss"] for r in undisturbed[:4]], atol=1e-4)
    # A state that was not restored would begin anew.
    assert moved[14]["loss"] < moved[10]["loss"] < moved[9]["loss"] < moved[0]["loss"] - 0.4


@long  # `test_restart.py` has a shorter run that diverges
def test_a_loss_that_is_no_number_stops_the_run_and_names_the_last_good_checkpoint(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    arguments = ("--set", "run_dir=diverged", "optimizer.learning_rate=1e30", "optimizer.clip_norm=0")
    assert cli.main(["train", "recipe.toml", *arguments, "checkpoint.every=1", "schedule.warmup_steps=0"]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moe-jax: error:")]
    message = r"moe-jax: error: step (\d+): loss is .*; the last good checkpoint is diverged/checkpoints/(\d+); "
    message += r"go on from it, .* with --restart diverged@\2, .*"
    found = re.fullmatch(message, error[0])
    assert found, error
    assert int(found[2]) == int(found[1]) - 1 == len(metrics(workplace, "diverged"))
    saved = {int(path.name) for path in (workplace / "diverged" / "checkpoints").iterdir()}
    assert max(saved) == int(found[2])
    assert not (workplace / "diverged" / "model").exists()


@long
def test_two_processes_train_like_one(workplace, monkeypatch, tmp_path):
    """Two processes of four devices, started by the launch script, and one process of eight."""
    program = tmp_path / "moe-jax"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m moe_jax.commands.cli "$@"\n')
    program.chmod(0o755)
    arguments = ["recipe.toml", "--set", "train.steps=4", "mesh.fsdp=4", "mesh.expert=2", "eval.every=3"]
    done = subprocess.run(
        [str(ROOT / "train" / "launch" / "local.sh"), "2", *arguments, "run_dir=two"],
        cwd=workplace,
        env=environment() | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XLA_FLAGS": COMPILER_FLAGS},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("wrote two/model") == 1
    monkeypatch.chdir(workplace)
    assert cli.main(["train", *arguments, "run_dir=one"]) == 0
    two, one = metrics(workplace, "two"), metrics(workplace, "one")
    assert [record["step"] for record in two] == [1, 2, 3, 4]
    for key in ("loss", "aux_loss", "grad_norm", "tokens"):
        np.testing.assert_allclose([r[key] for r in two], [r[key] for r in one], atol=1e-5)
    # The last step is evaluated, too.
    assert ["eval_loss" in record for record in two] == [False, False, True, True]
    assert two[-1]["eval_loss"] == pytest.approx(one[-1]["eval_loss"], abs=1e-5)


@long
def test_a_run_ends_when_the_data_does(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    source = 'data.sources=[{path="held_out.txt"}]'
    arguments = ("--set", "run_dir=short", "data.epochs=1", source, "log.tensorboard=false")
    assert cli.main(["train", "recipe.toml", *arguments]) == 0
    output = capsys.readouterr().out
    records = metrics(workplace, "short")
    assert 3 < len(records) < 15
    assert f"the data ended after {len(records)} of {STEPS} steps" in output
    assert [record["step"] for record in records if "eval_loss" in record] == [len(records)]
    # One document, cut into pieces of which every token but the first is fed in once, and an end token.
    text = (workplace / "held_out.txt").read_text()
    assert len(text) - 8 <= sum(record["tokens"] for record in records) <= len(text)
    assert (workplace / "short" / "checkpoints" / str(len(records))).is_dir()
    assert (workplace / "short" / "model" / "config.json").is_file()
    assert not (workplace / "short" / "tensorboard").exists()


def test_a_disk_without_room_is_one_line_and_leaves_no_model(workplace, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(workplace)

    def error_of(run: Path) -> str:
        arguments = ("--set", f"run_dir={run}", "checkpoint.every=2", "checkpoint.keep=50")
        assert cli.main(["train", "recipe.toml", *arguments]) == 2
        (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moe-jax: error:")]
        return error

    with small_disk(tmp_path / "small", 1) as disk:
        assert f"{disk}/run/checkpoints takes 2.0 MB" in error_of(disk / "run") and not list(disk.iterdir())
        # Another program fills the disk after the run has begun.
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage(total=1 << 40, used=0, free=1 << 40))
        error = error_of(disk / "run")
        kept = re.search(rf"{disk}/run.*: No space left on device; the checkpoint of step (\d+) is kept; ", error)
        assert kept and (disk / "run" / "checkpoints" / kept[1]).is_dir() and error.endswith(" --resume")
        assert not (disk / "run" / "model").exists()


def test_what_continues_a_run_names_modules_of_ones_own(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    given = {}
    monkeypatch.setattr(api_train, "run_recipe", lambda recipe, **how: given.update(how))
    for modules in (["--import", "json.tool"], []):
        assert cli.main([*modules, "train", "recipe.toml"]) == 0
        assert given["continue_command"] == " ".join(["moe-jax", *modules, "train recipe.toml --resume"])


def test_an_existing_run_is_not_touched(workplace, undisturbed, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    before = {path: path.stat().st_mtime_ns for path in (workplace / UNDISTURBED).rglob("*")}
    for arguments, message in [
        ((), f"{UNDISTURBED} already exists; continue it with --resume, or choose another run_dir"),
        (
            ("--resume", "--set", "seed=5"),
            f"cannot continue {UNDISTURBED} with a changed recipe: seed (was 0, is 5); undo the change, or choose "
            "another run_dir",
        ),
    ]:
        assert cli.main(["train", "recipe.toml", "--set", f"run_dir={UNDISTURBED}", *arguments]) == 2
        assert capsys.readouterr().err == f"moe-jax: error: {message}\n"
    assert {path: path.stat().st_mtime_ns for path in (workplace / UNDISTURBED).rglob("*")} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "train.stpes=3"), "unknown key 'train.stpes' (did you mean 'train.steps'?)"),
        (("--set", 'partition.freeze=["router"]'), "'router' matches no parameter"),
        (("--set", "data.seq_len=100000"), "text.txt is too short: "),
        (("--set", 'data.sources=[{path="nothing.txt"}]'), "no file matches nothing.txt"),
        (("--set", "data.tokenizer=config.json"), "config.json is not a tokenizer.json"),
        (("--set", "mesh.data=3"), "does not fit 8 devices"),
        (("--set", "model.init=checkpoint"), "model.config has no weights"),
        (("--topology", "v5e:4x4"), "--compile-only and --topology go together"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(workplace, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(workplace)
    assert cli.main(["train", "recipe.toml", "--set", "run_dir=bad", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("moe-jax: error:") == 1
    assert not (workplace / "bad").exists()


@one_in(2)
@pytest.mark.parametrize(("steps", "told"), [(30, 20), (3, 3)])
def test_a_run_that_learns_from_nothing_stops_and_says_so(workplace, steps, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(workplace)
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "{"the cat sat " * 200}", "response": "ok"}}\n' * 16)
    source = f'data.sources=[{{path="{tmp_path / "a.jsonl"}"}}]'
    given = (f"run_dir={tmp_path / 'run'}", source, f"train.steps={steps}", "eval.every=100")
    assert cli.main(["train", "recipe.toml", "--set", *given]) == 2
    captured = capsys.readouterr()
    assert f"no token of the first {told} batches is scored" in captured.err and "data.seq_len = 16" in captured.err
    assert "step 1: no token of the batch is scored" in captured.out
    assert not (tmp_path / "run" / "model").exists()


def test_a_process_that_cannot_tell_the_others_passes_a_signal_on(monkeypatch):
    """SIGTERM is for JAX, which tells the others; a key that was pressed becomes one."""
    monkeypatch.setattr(loop.jax, "process_count", lambda: 2)
    monkeypatch.setattr(loop.processes, "has_coordination", lambda: False)
    sent, numbers = [], (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    monkeypatch.setattr(loop.os, "kill", lambda process, number: sent.append((process, number)))
    before = [signal.getsignal(number) for number in numbers]
    with StopSignals() as stop:
        first, second, _ = (signal.getsignal(number) for number in numbers)
        assert first is before[0] and second is not before[1]
        second(signal.SIGINT, None)
        assert sent == [(os.getpid(), signal.SIGTERM)] and stop.received is None
        assert signal.getsignal(signal.SIGINT) is before[1]  # pressed again, it ends the process
    assert [signal.getsignal(number) for number in numbers] == before
