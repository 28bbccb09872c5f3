"""Small dense models to upcycle."""

from functools import partial
from pathlib import Path

import pytest

from moe_jax.commands import cli
from tests.support.dense_models import dense_config, random_leaves, write_model


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory) -> Path:
    """A model directory in bfloat16 with biases, a plain FFN and a file that goes with it."""
    folder = tmp_path_factory.mktemp("dense")
    (folder / "tokenizer.json").write_text("{}")
    config = dense_config(gated=False, bias=True, dtype="bfloat16", tie_embeddings=True)
    return write_model(folder / "model", config, random_leaves(config), (folder / "tokenizer.json",))


@pytest.fixture
def failing_command(capsys, tmp_path):
    """Runs a command that must fail: exit code 2, nothing written, and one line, which it returns."""

    def check(*arguments) -> str:
        capsys.readouterr()
        before = sorted(tmp_path.rglob("*"))
        assert cli.main(list(map(str, arguments))) == 2
        assert sorted(tmp_path.rglob("*")) == before
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("moe-jax: error: ") and err.count("\n") == 1
        return err

    return check


@pytest.fixture
def failing(failing_command):
    """The same for `upcycle`."""
    return partial(failing_command, "upcycle")
