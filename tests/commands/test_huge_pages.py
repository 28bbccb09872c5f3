"""A process that starts anew to have memory in huge pages."""

import os
import subprocess
import sys

import pytest

from moe_jax.commands import cli, environment
from moe_jax.commands.environment import TUNABLE, TUNABLES, ask_for_huge_pages

MADVISE, ALWAYS, NEVER = "always [madvise] never", "[always] madvise never", "always madvise [never]"


class StartedAnew(Exception):
    pass


@pytest.fixture
def system(tmp_path, monkeypatch):
    """What the system says, and what is called to start a process anew."""

    def pretend(policy: str = MADVISE, library: str = "glibc 2.35", tunables: str | None = None):
        (tmp_path / "enabled").write_text(policy)
        monkeypatch.setattr(environment, "_POLICY", tmp_path / "enabled")
        monkeypatch.setattr(os, "confstr", lambda name: library)
        monkeypatch.setenv(TUNABLES, tunables or "")
        if tunables is None:
            monkeypatch.delenv(TUNABLES)

    def start(program: str, words: list[str]) -> None:
        raise StartedAnew(program, words)

    monkeypatch.setattr(os, "execv", start)
    return pretend


def test_the_process_starts_anew_with_its_arguments(system, monkeypatch):
    system(tunables="glibc.malloc.check=0")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "moe_jax.commands.cli", "train", "a.toml"])
    with pytest.raises(StartedAnew) as started:
        ask_for_huge_pages()
    assert started.value.args == (
        sys.executable,
        [sys.executable, "-m", "moe_jax.commands.cli", "train", "a.toml"],
    )
    assert os.environ[TUNABLES] == f"glibc.malloc.check=0:{TUNABLE}=1"
    ask_for_huge_pages()  # of the process that was started: nothing


@pytest.mark.parametrize(
    "said",
    [
        {"policy": ALWAYS}, {"policy": NEVER}, {"library": "glibc 2.34"}, {"library": "musl"},
        {"tunables": f"{TUNABLE}=0"},
    ],
    ids=str,
)  # fmt: skip
def test_it_goes_on_where_there_is_nothing_to_ask_for(system, said):
    system(**said)
    before = os.environ.get(TUNABLES)
    ask_for_huge_pages()
    assert os.environ.get(TUNABLES) == before


def test_it_goes_on_where_no_process_can_be_started(system, monkeypatch):
    system()

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "execv", refuse)
    ask_for_huge_pages()
    assert TUNABLES not in os.environ


def test_commands_in_this_process_start_nothing(system, capsys):
    system()
    assert cli.main(["train", "nothing.toml"]) == 2
    assert "nothing.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["train", "a.toml"], True),
        (["serve", "a"], True),
        (["plan", "a.toml", "--train"], True),
        (["plan", "--train=a.toml"], True),
        (["plan", "a.toml"], False),
        (["inspect", "a", "--train"], False),
        ([], False),
    ],
    ids=str,
)
def test_programs_that_compute_ask_for_huge_pages(words, asks, monkeypatch):
    asked = []
    monkeypatch.setattr(sys, "argv", ["moe-jax", *words])
    monkeypatch.setattr(cli, "ask_for_huge_pages", lambda: asked.append(True))
    monkeypatch.setattr(cli, "open_standard_streams", lambda: None)
    monkeypatch.setattr(cli, "run_command", lambda arguments, modules: 7 if arguments == words else 1)
    monkeypatch.setattr(cli.atexit, "register", lambda action: None)
    assert cli.main() == 7 and bool(asked) == asks


def test_a_command_says_what_it_would(tmp_path):
    """Whatever this system gives."""
    done = subprocess.run(
        [sys.executable, "-m", "moe_jax.commands.cli", "train", "nothing.toml"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2 and "nothing.toml" in done.stderr
