"""Small MoEs whose experts came from one dense model, in memory and on disk."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import moe_jax
from moe_jax.commands import cli
from moe_jax.models import BankConfig
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.support.dense_models import ATTENTION, dense_config, random_leaves, write_model
from tests.support.moe_models import moe_config, run, trained_leaves


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """`dense`, and `moe` whose layers 0 and 2 of 3 are MoEs of full experts; float32, tokens are bytes.

    `one` is for what takes long to compile: one layer, an MoE, whose matrices are of one shape, so that they share
    programs.
    """
    folder = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer(folder / "tokenizer.json")
    dense = dataclasses.replace(dense_config(num_layers=3), vocab_size=264, bos_id=BOS, eos_ids=(EOS,))
    leaves = random_leaves(dense)
    moe = moe_config(dense, BankConfig(), None, BankConfig())
    trained = trained_leaves(moe, leaves)
    one = dataclasses.replace(dense_config(num_layers=1, dim=16), vocab_size=264, bos_id=BOS, eos_ids=(EOS,))
    attention = dataclasses.replace(ATTENTION, num_kv_heads=2)
    one = dataclasses.replace(one, layers=(dataclasses.replace(one.layers[0], attention=attention),))
    of_one = random_leaves(one)
    one = moe_config(one, BankConfig())
    return {
        "dense": write_model(folder / "dense", dense, leaves, (tokenizer,)),
        "moe": write_model(folder / "moe", moe, trained, (tokenizer,)),
        "one": write_model(folder / "one", one, trained_leaves(one, of_one), (tokenizer,)),
    }


@pytest.fixture(scope="session")
def coded(models, tmp_path_factory):
    """`moe` with everything in codes of 4 bits."""
    out = tmp_path_factory.mktemp("coded") / "model"
    moe_jax.compress(models["moe"], out, method="quantize", bits=4, group_size=8, of="model", zero_points=True)
    return out


@pytest.fixture
def out_of(capsys):
    """Runs any command, which must succeed, and returns what it printed on standard output."""

    def command(*words) -> str:
        capsys.readouterr()
        assert cli.main([str(word) for word in words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return command


@pytest.fixture
def text(tmp_path):
    """A text file."""
    file = tmp_path / "text.txt"
    file.write_text("All the world is a stage, and all the men and women merely players. " * 10)
    return file


@pytest.fixture
def windows(text) -> np.ndarray:
    """The text as token ids Int32[N, 32]."""
    ids = np.frombuffer(text.read_bytes(), np.uint8)
    return ids[: len(ids) // 32 * 32].reshape(-1, 32).astype(np.int32)


@pytest.fixture
def failing(capsys, tmp_path):
    """Runs a command that must fail: exit code 2, nothing written, and one line, which it returns.

    With `lines=None` there may be several: every leaf that is wrong has its own.
    """

    def check(*arguments, lines=1) -> str:
        capsys.readouterr()
        before = sorted(path for path in tmp_path.rglob("*"))
        assert run(*arguments) == 2
        assert sorted(path for path in tmp_path.rglob("*")) == before
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("moe-jax: error: ") and err.count("\n") == (lines or err.count("\n"))
        return err

    return check
