"""`moe-jax serve`, as a user starts and stops it."""

import os
import signal
import subprocess
import sys
import types

import pytest

from moe_jax.commands import cli, serve
from moe_jax.serve.access import Access
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.environment import ROOT
from tests.support.forked import OF_COMMANDS, start
from tests.support.served_models import client_of


def test_it_says_where_it_listens_and_ends_cleanly(served_dir):
    import openai

    arguments = [
        sys.executable,
        "-m",
        "moe_jax.commands.cli",
        "serve",
        str(served_dir),
        "--port",
        "0",
        "--name",
        "mine",
        "--context",
        "310",
    ]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    env = os.environ | {"PYTHONPATH": str(ROOT), "MOE_JAX_API_KEY": "none"}  # that of the client
    with start(arguments, imports=OF_COMMANDS, env=env, **how) as run:
        try:
            line = run.stdout.readline()
            assert line.startswith("serving 'mine' at http://127.0.0.1:") and line.endswith("8 seats of 310 tokens\n")
            client = client_of(line.split(" at ")[1].split()[0].removesuffix("/v1"))
            assert (
                client.completions.create(model="mine", prompt="a", max_tokens=2, seed=1).usage.completion_tokens == 2
            )
            client.api_key = "another"
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            run.send_signal(signal.SIGTERM)
            out, err = run.communicate(timeout=30)
            assert run.returncode == 0 and err.splitlines()[-1] == "moe-jax: stopped"
            assert "moe-jax: compiling" in err.splitlines() and "was made for 300 positions, not 310" in err
        finally:
            run.kill()


def test_what_cannot_be_served_is_told(served_dir, tmp_path, capsys):
    config = dense_config(num_layers=1)
    bare = write_model(tmp_path / "bare", config, random_leaves(config))
    for path, options, message in (
        (bare, (), "has no tokenizer.json, which serving needs"),
        (served_dir, ("--port", "70000"), "port=70000 must lie from 0 to 65535"),
        (served_dir, ("--seats", "0"), "seats=0 must be at least 1"),
        (served_dir, ("--api-key", ""), "printable ASCII"),
        (tmp_path / "absent", (), "absent"),
    ):
        assert cli.main(["serve", str(path), "--port", "0", *options]) == 2
        err = capsys.readouterr().err
        assert message in err and err.startswith("moe-jax: error: ") and err.count("\n") == 1


def test_a_server_that_anyone_may_use_is_warned_of(capsys):
    for access in (Access(), Access("key", local_only=False)):
        serve._warn_if_open(access)
    assert capsys.readouterr().err == ""
    serve._warn_if_open(Access(local_only=False))
    assert capsys.readouterr().err.startswith("warning: ")


def test_what_is_compiled_is_said_to_whoever_reads_it(monkeypatch):
    """A pipe that is closed, as that of `head`, ends no thread."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        serve._say_compiling(2, 256)
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)


def test_it_ends_without_what_is_still_compiled(monkeypatch):
    left: list[int] = []
    monkeypatch.setattr(serve, "leave_at_once", left.append)
    for ended in (True, False):
        serve._end(types.SimpleNamespace(close=lambda seconds, ended=ended: ended))
        assert left == [0] * (not ended)
