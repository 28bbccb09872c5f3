"""A command that is added from the folder of the tests: a module and a line in the table, and nothing else."""

import sys

import pytest

import moe_jax
from moe_jax.commands import cli
from tests.support import toy_command


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `moe-jax tally`; returns the exit code and what was printed."""
    monkeypatch.setitem(sys.modules, "moe_jax.commands.tally", toy_command)
    monkeypatch.setitem(cli.COMMANDS, "tally", "number of parameters")

    def run(*arguments):
        code = cli.main(list(map(str, arguments)))
        return code, *capsys.readouterr()

    return run


def test_help_is_made_of_its_spec(run):
    code, overview, _ = run("--help")
    assert code == 0 and "tally" in overview and "number of parameters" in overview
    code, shown, _ = run("tally", "--help")
    assert code == 0 and shown.startswith("usage: moe-jax tally")
    for words in ("--unit one|thousand", "(default: one)", "--below PATH", "(default: everything)", "--no-biases"):
        assert words in shown
    assert "not with --unit thousand" in " ".join(shown.split()) and "moe-jax tally moe-dir --below" in shown


def test_it_runs_and_says_what_is_wrong(run, tmp_path):
    model = moe_jax.save(moe_jax.tiny_model(), tmp_path / "model")
    assert run("tally", model)[:2] == (0, "6736\n")
    assert run("tally", model, "--unit", "thousand")[:2] == (0, "6.736\n")
    assert run("tally", model, "--below", "embed", "--no-biases")[:2] == (0, f"{64 * 16}\n")
    code, out, error = run("tally", model, "--below", "embed", "--unit", "thousand")
    assert (code, out) == (2, "") and "--below" in error
    code, out, error = run("tally", model, "--belwo", "embed")
    assert (code, out) == (2, "") and "did you mean '--below'" in error
    assert run("tally", tmp_path / "absent")[0] == 2
