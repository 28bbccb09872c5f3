"""Runs of two processes on the real command: killed, stopped, restarted on two and on one, and what follows a run."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_jax.commands import cli
from tests.support.dense_models import random_leaves, write_model
from tests.support.environment import ROOT
from tests.support.forked import OF_COMMANDS, start
from tests.support.jobs import Job, job, run
from tests.support.tiers import EVERY, long, one_in
from tests.support.training_models import BANKS, FFN, config_of, moe, write_config

# The batches of one pass over the text; the recipe asks for more.
STEPS = 19
RECIPE = """
run_dir = "run"
[model]
config = "config.json"
init = "random"
[data]
tokenizer = "{tokenizer}"
seq_len = 16
epochs = 1
sources = [{{ path = "text/*.txt" }}]
[optimizer]
learning_rate = 1e-2
[schedule]
kind = "constant"
[train]
steps = 1000
batch_size = 4
[checkpoint]
every = 3
keep = 20
[log]
every = 100
tensorboard = false
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tokenizer_path) -> Path:
    """A directory with a recipe and what it needs."""
    folder = tmp_path_factory.mktemp("processes")
    # Who reads what does not depend on the layers, which are what takes time.
    write_config(folder / "config.json", config_of(moe(BANKS["low-rank"]) if EVERY else FFN))
    (folder / "text").mkdir()
    # Documents of different lengths: the rows of one process end before those of the other.
    for number in range(22):
        lines = (f"{number}: {'the' if number % 3 else 'a'} line {i}\n" for i in range(2 + number % 4))
        (folder / "text" / f"{number}.txt").write_text("".join(lines))
    (folder / "recipe.toml").write_text(RECIPE.format(tokenizer=tokenizer_path))
    return folder


def metrics(folder: Path, run_dir: str) -> list[dict]:
    file = folder / run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def count_steps(folder: Path, run_dir: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (folder / run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def curve(records: list[dict]) -> list[tuple]:
    return [(r["step"], r["loss"], r["aux_loss"], r["grad_norm"], r["tokens"]) for r in records]


def check_same_curve(found: list[dict], expected: list[dict], *, bits_until: int) -> None:
    """Equal to the last bit up to a step, and to 1e-5 after it; the same tokens in every step."""
    assert curve(found[:bits_until]) == curve(expected[:bits_until])
    assert [(r["step"], r["tokens"]) for r in found] == [(r["step"], r["tokens"]) for r in expected]
    np.testing.assert_allclose([r["loss"] for r in found], [r["loss"] for r in expected], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def undisturbed(workplace) -> list[dict]:
    """The metrics of a run of two processes from beginning to end."""
    first, second = run(workplace, "train", "recipe.toml", "--set", "run_dir=undisturbed", "checkpoint.every=10")
    assert first.startswith("2 processes with 1 devices each: 2 devices (cpu)\n") and second == ""
    records = metrics(workplace, "undisturbed")
    assert f"the data ended after {len(records)} of 1000 steps" in first and "wrote undisturbed/model" in first
    return records


def test_every_token_is_trained_on_once_whoever_reads_it(workplace, undisturbed):
    # Each byte of a document is fed in, and a token that ends it is asked for.
    assert sum(r["tokens"] for r in undisturbed) == sum(len(f.read_bytes()) for f in workplace.glob("text/*"))
    assert len(undisturbed) == STEPS


def kill(folder: Path, run_dir: str, victim: int, moment: Callable[[Job], object], **how) -> float:
    """Starts or continues a run, kills one process at some moment of it; returns how long the other lived on."""
    with job(folder, "train", "recipe.toml", "--resume", "--set", f"run_dir={run_dir}", **how) as started:
        moment(started)
        started.processes[victim].kill()
        killed = time.monotonic()
        (code, _, said) = started.ended()[1 - victim]
        seconds = time.monotonic() - killed
    assert started.processes[victim].returncode == -signal.SIGKILL
    # One line, and not what the runtime would say, from the stack of C++ functions down.
    assert code == 1 and said.count("moe-jax: error: ") == 1 and "Traceback" not in said and "stack" not in said
    assert f"process {victim} ({victim + 1} of 2, on " in said and "is gone: it was killed" in said
    assert not (folder / run_dir / "model").exists()
    return seconds


def unfinished(folder: Path, run_dir: str) -> list[int]:
    """Steps whose checkpoints were begun and are not complete: Orbax renames one when all of it is on the disk."""
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(folder / run_dir / "checkpoints")
        begun = {int(name.partition(".")[0]) for name in names if ".orbax-checkpoint-tmp" in name}
        return sorted(begun - {int(name) for name in names if name.isdigit()})
    return []


def stop_in_a_checkpoint(started: Job, victim: int, folder: Path, run_dir: str) -> int:
    """Stops a process, for good, in the middle of a checkpoint that cannot be completed without it; returns its step.

    There is a complete one before it.
    """
    process = started.processes[victim]

    def writing() -> list[int]:
        return [step for step in unfinished(folder, run_dir) if step > 3]

    while True:
        started.until(writing)
        assert process.poll() is None, "no checkpoint was found unfinished"
        process.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
        # Perhaps its part was done already: then the other process completes the checkpoint now.
        time.sleep(1)
        if found := writing():
            return found[-1]
        process.send_signal(signal.SIGCONT)


def kill_in_a_checkpoint(folder: Path, run_dir: str, victim: int, **how) -> tuple[float, int]:
    """As `kill`, while a checkpoint is being written, which therefore never becomes one; its step, too."""
    steps: list[int] = []

    def stop(started: Job) -> None:
        steps.append(stop_in_a_checkpoint(started, victim, folder, run_dir))

    seconds = kill(folder, run_dir, victim, stop, **how)
    assert unfinished(folder, run_dir) == steps
    return seconds, steps[0]


@long
def test_killed_stopped_and_moved_a_run_gives_the_same_curve(workplace, undisturbed):
    """One process is killed in the middle of a checkpoint, the two that go on from the one before it are stopped by a
    signal to one, and one goes on alone."""
    seconds, unfinished_step = kill_in_a_checkpoint(workplace, "tried", 1)
    assert seconds < 30
    file = workplace / "tried" / "metrics.jsonl"
    before = file.stat().st_mtime_ns
    with job(workplace, "train", "recipe.toml", "--resume", "--set", "run_dir=tried") as started:
        # The steps after the checkpoint before it are recorded anew.
        started.until(lambda: file.stat().st_mtime_ns > before and count_steps(workplace, "tried") >= unfinished_step)
        started.processes[1].send_signal(signal.SIGTERM)
        (code, out, said), (other, silent, _) = started.ended()
    stopped = re.search(r"SIGTERM: step (\d+) of 1000 is saved; continue with: moe-jax train recipe.toml", out)
    assert (code, other, silent) == (143, 143, "") and stopped, out + said
    step = int(stopped[1])
    assert unfinished_step <= step < STEPS and count_steps(workplace, "tried") == step
    assert f"continuing after step {unfinished_step - 3}\n" in out
    (out,) = run(workplace, "train", "recipe.toml", "--resume", "--set", "run_dir=tried", processes=1, devices=1)
    assert f"continuing after step {step}\n" in out
    check_same_curve(metrics(workplace, "tried"), undisturbed, bits_until=step)


@long  # `make test` has one way through these, above
@pytest.mark.parametrize("processes", [2, 1])
@pytest.mark.parametrize("moment", ["in a step", "in a checkpoint"])
@pytest.mark.parametrize("victim", [0, 1])
def test_whichever_process_is_killed_whenever_the_run_goes_on(workplace, undisturbed, victim, moment, processes):
    run_dir = f"killed-{victim}-{moment[5:]}-{processes}"
    if moment == "in a step":
        kill(workplace, run_dir, victim, lambda job: job.until(lambda: count_steps(workplace, run_dir) >= 8))
        # Checkpoints are written while steps go on: that of step 6 may be unfinished at step 8.
        expected = [3, 6, 9]
    else:
        _, unfinished_step = kill_in_a_checkpoint(workplace, run_dir, victim)
        expected = [unfinished_step - 3]
    first, *_ = run(workplace, "train", "recipe.toml", "--resume", "--set", f"run_dir={run_dir}", processes=processes)
    saved = int(re.search(r"continuing after step (\d+)\n", first)[1])
    assert saved in expected
    bits = STEPS if processes == 2 else saved
    check_same_curve(metrics(workplace, run_dir), undisturbed, bits_until=bits)
    assert (workplace / run_dir / "model" / "config.json").is_file()


SCORED = ["eval", "undisturbed/model", "--text", "text/1.txt", "--seq-len", "16"]
COMMANDS = {
    "eval": [*SCORED, "--json"],
    "eval split": [*SCORED, "--split", "--json"],
    "classify": ["eval", "undisturbed/model", "--classify", "labelled.jsonl", "--json"],
    "generate": ["generate", "undisturbed/model", "--prompt", "1: the", "--max-new-tokens", "9", "--json"],
    "generate on a mesh": [
        *("generate", "undisturbed/model", "--prompt", "1: the", "--prompt", "2", "--max-new-tokens", "40", "--json"),
        *("--mesh", "data=2"),
    ],
    "generate on a tensor mesh": [
        *("generate", "undisturbed/model", "--prompt", "1: the", "--max-new-tokens", "40", "--json"),
        *("--mesh", "tensor=2"),
    ],
    "inspect": ["inspect", "undisturbed/model", "--json"],
    "compress": ["compress", "undisturbed/model", "OUT", "--method", "quantize", "--bits", "4", "--json"],
    "export": ["export", "undisturbed/model", "OUT"],
    "convert": ["convert", "exported", "OUT"],
    "merge": ["merge", "tuned", "OUT"],
    "upcycle to adapters": ["upcycle", "dense", "OUT", "--method", "pesc", "--adapter", "4", "--rest", "lora:2"],
    "upcycle": ["upcycle", "dense", "OUT", "--every", "1", "--experts", "2", "--top-k", "2", "--delta", "low-rank:2"],
}


@pytest.fixture(scope="module")
def models(workplace, undisturbed) -> Path:
    """The directory with a dense model, an exported one and labelled texts besides."""
    dense = config_of(FFN)
    tokenizer = workplace / "undisturbed" / "model" / "tokenizer.json"
    write_model(workplace / "dense", dense, random_leaves(dense), (tokenizer,))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace)
        assert cli.main(["export", "dense", "exported"]) == 0
        lora = ["--method", "lora", "--adapter", "lora:2", "--targets", "q,up"]
        assert cli.main(["adapt", "dense", "tuned", *lora]) == 0
    lines = [json.dumps({"text": f"{n} is", "label": ("odd", "even")[n % 2]}) for n in range(3)]
    (workplace / "labelled.jsonl").write_text("\n".join(lines))
    return workplace


@one_in(18)  # what they compute together; `distributed/test_processes.py` has what they write together
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_gives_on_two_processes_what_it_gives_on_one_and_once(models, name, monkeypatch, capsys):
    arguments = [f"two-{name}" if one == "OUT" else one for one in COMMANDS[name]]
    first, second = run(models, *arguments)
    assert second == ""
    capsys.readouterr()
    monkeypatch.chdir(models)
    on_mesh = ("--mesh", "data=2", "tensor=2")
    alone = [f"one-{name}" if one == "OUT" else one for one in COMMANDS[name] if one not in on_mesh]
    assert cli.main(alone) == 0
    expected = capsys.readouterr().out
    if name.startswith(("eval", "generate", "classify")):
        found, wanted = json.loads(first), json.loads(expected)
        assert list(found) == list(wanted) if isinstance(found, dict) else found == wanted
        if "nll" in wanted:
            assert found["nll"] == pytest.approx(wanted["nll"], abs=1e-5)
            assert (found["tokens"], found["windows"]) == (wanted["tokens"], wanted["windows"])
        elif isinstance(wanted, dict):
            assert found["predictions"] == wanted["predictions"]
        return
    if "OUT" not in COMMANDS[name]:
        assert first == expected
        return
    assert len(first.splitlines()) == len(expected.splitlines())
    two, one = models / f"two-{name}", models / f"one-{name}"
    files = [path.relative_to(one) for path in sorted(one.rglob("*")) if path.is_file()]
    assert files == [path.relative_to(two) for path in sorted(two.rglob("*")) if path.is_file()]
    weights = [path for path in files if path.suffix == ".safetensors" or re.fullmatch(r"[\d.]+", path.name)]
    assert weights and all((two / path).read_bytes() == (one / path).read_bytes() for path in weights)


@one_in(3)
@pytest.mark.parametrize("what", ["recipe", "code", "data"])
def test_processes_that_differ_are_refused_before_anything_is_written(workplace, what, tmp_path):
    arguments = ["train", "recipe.toml", "--set", "run_dir=differs"]
    second: dict[str, Any] = {}
    if what == "recipe":
        second["arguments"] = [*arguments, "train.batch_size=8"]
    elif what == "data":
        ignore = shutil.ignore_patterns("undisturbed", "tried")
        second["folder"] = shutil.copytree(workplace, tmp_path / "copy", ignore=ignore)
        (tmp_path / "copy" / "text" / "1.txt").write_text("another text, as long as that of the first one was\n" * 3)
    else:
        shutil.copytree(ROOT / "moe_jax", tmp_path / "moe_jax")
        with (tmp_path / "moe_jax" / "draws.py").open("a") as file:
            file.write("# changed\n")
        second["PYTHONPATH"] = str(tmp_path)
    with job(workplace, *arguments, second=second) as started:
        for code, _, said in started.ended():
            assert code == 2 and said.count("moe-jax: error: ") == 1, said
            expected = {
                "recipe": "the processes differ: train.batch_size is 8 in process 1, and 4 in the first",
                "data": "the processes differ: the content of data.sources[0] is ",
                "code": f"process 1 (on {socket.gethostname()}) and the first do not fit: moe_jax is 0.1.0 (source ",
            }
            assert expected[what] in said
    assert not (workplace / "differs").exists()


def test_a_first_process_that_does_not_answer_is_not_waited_for_for_ever(workplace):
    arguments = [sys.executable, "-m", "moe_jax.commands.cli", "train", "recipe.toml"]
    with socket.create_server(("localhost", 0)) as deaf:
        port = deaf.getsockname()[1]
        place = {"MOE_JAX_DISTRIBUTED": f"localhost:{port},2,1", "MOE_JAX_DISTRIBUTED_WAIT": "1"}
        environment = os.environ | place | {"PYTHONPATH": str(ROOT)}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process = start(arguments, imports=OF_COMMANDS, cwd=workplace, env=environment, **pipes)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and said.count("\n") == 1
    assert f"process 1 of 2 did not meet all the others through the first one at localhost:{port} in 1 s" in said


@long
def test_what_somebody_reads_along_is_for_one_process(models):
    with job(models, "generate", "undisturbed/model", "--prompt", "1", "--stream", "--mesh", "data=2") as started:
        for code, out, said in started.ended():
            assert (code, out) == (2, "") and said.count("\n") == 1 and "--stream need" in said
