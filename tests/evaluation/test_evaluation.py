"""Held-out loss: windows as the definition says, whatever the batch; and the eval command."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.data.tokenizer import Tokenizer
from moe_jax.distributed.sharding import make_mesh
from moe_jax.evaluation.held_out import Evaluator, read_text
from moe_jax.model_io.loading import model_leaves
from moe_jax.model_io.model_dir import ModelDirectoryWriter
from moe_jax.nn import Decoder
from tests.support.losses import token_losses
from tests.support.tiers import one_in
from tests.support.training_models import config_of, moe

CONFIG = config_of(moe())
TEXT = "the quick brown fox jumps over the lazy dog, and 17 times more.\n"


@pytest.fixture(scope="module")
def model() -> Decoder:
    state = jax.jit(lambda: nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(3))))()
    return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(3)))), state)


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, 61).astype(np.int32)


def ids_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


@nnx.jit
def window_loss(model: Decoder, window: jax.Array) -> jax.Array:
    return token_losses(model(window).logits[:, :-1], window[:, 1:]).sum()


def by_definition(model: Decoder, ids: np.ndarray, seq_len: int) -> tuple[int, float]:
    """Tokens scored and the sum of their losses, one window at a time and without padding."""
    scored, total = 0, 0.0
    for start in range(0, len(ids), seq_len):
        window = jnp.asarray(ids[start : start + seq_len])[None]
        if window.shape[1] > 1:
            total += float(window_loss(model, window))
            scored += window.shape[1] - 1
    return scored, total


@one_in(2)
@pytest.mark.parametrize("seq_len", [20, 100])
def test_every_token_but_the_first_of_each_window_is_scored(model, ids, seq_len):
    graphdef, state = nnx.split(model)
    found = Evaluator(graphdef, ids, seq_len=seq_len, batch_size=3)(state)
    scored, total = by_definition(model, ids, seq_len)
    assert found.tokens == scored
    assert found.windows == math.ceil(61 / seq_len)
    assert found.total_nll == pytest.approx(total, rel=1e-5)
    assert found.nll == pytest.approx(total / scored, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / scored), rel=1e-4)


def test_a_mesh_and_the_batch_size_change_nothing(model, ids):
    graphdef, state = nnx.split(model)
    alone = Evaluator(graphdef, ids, seq_len=16, batch_size=1)(state)
    mesh = make_mesh({"data": 4, "fsdp": 2})
    spread = Evaluator(graphdef, ids, seq_len=16, batch_size=3, mesh=mesh)(state)
    assert spread.tokens == alone.tokens == 61 - 4
    assert spread.nll == pytest.approx(alone.nll, rel=1e-6)


def test_a_window_of_one_token_scores_nothing(model, ids):
    graphdef, state = nnx.split(model)
    assert Evaluator(graphdef, ids, seq_len=20, batch_size=3)(state).tokens == 60 - 3
    with pytest.raises(InputError, match="seq_len = 1 must .* least 2"):
        Evaluator(graphdef, ids, seq_len=1, batch_size=1)


def test_text_is_tokenised_whole_and_without_special_tokens(tmp_path, tokenizer_path):
    (tmp_path / "a.txt").write_bytes(b"two lines\r\nof text")
    tokenizer = Tokenizer(tokenizer_path, CONFIG)
    assert read_text(tmp_path / "a.txt", tokenizer).tolist() == list(b"two lines\r\nof text")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match="a.txt holds 1 tokens"):
        read_text(tmp_path / "a.txt", tokenizer)
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(InputError, match="a.txt is not UTF-8 text at byte 3"):
        read_text(tmp_path / "a.txt", tokenizer)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory, model, tokenizer_path):
    path = tmp_path_factory.mktemp("eval") / "model"
    with ModelDirectoryWriter(path, CONFIG, tokenizer_files=(tokenizer_path,), lineage=[]) as writer:
        for name, leaf in model_leaves(model):
            writer.write({name: leaf})
    return path


def test_the_command_prints_nothing_but_json(model, model_directory, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    assert cli.main(["eval", str(model_directory), "--text", str(text), "--seq-len", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    scored, total = by_definition(model, ids_of(TEXT), 16)
    assert found["tokens"] == scored
    assert found["nll"] == pytest.approx(total / scored, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    assert found["seq_len"] == 16
    assert cli.main(["eval", str(model_directory), "--text", str(text), "--split", "--seq-len", "65"]) == 0
    captured = capsys.readouterr()
    printed = float(re.search(r"perplexity (\S+)", captured.out)[1])
    assert printed == pytest.approx(math.exp(by_definition(model, ids_of(TEXT), 65)[1] / 63), rel=1e-4)
    assert "was made for 64 positions, not 65" in captured.err
    assert " tokens scored in 1 windows of 65\n" in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "none.txt"), "no text at none.txt"),
        (("--text", "{text}", "--seq-len", "1"), "seq_len = 1 must be at least 2"),
        (("--text", "{text}", "--batch-size", "0"), "--batch-size 0 must be at least 1"),
    ],
)
def test_bad_input_of_the_command_is_one_line(model_directory, tmp_path, capsys, arguments, message):
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = [argument.format(text=tmp_path / "text.txt") for argument in arguments]
    assert cli.main(["eval", str(model_directory), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_another_tokenizer_may_be_named(model_directory, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)

    def scored(*arguments) -> int:
        return cli.main(["eval", str(model_directory), "--text", str(text), "--seq-len", "16", "--json", *arguments])

    assert scored() == 0
    own = json.loads(capsys.readouterr().out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_bytes((model_directory / "tokenizer.json").read_bytes())
    assert scored("--tokenizer", str(tmp_path / "other")) == 0
    assert json.loads(capsys.readouterr().out) == own
    assert scored("--tokenizer", str(tmp_path)) == 2
    assert f"no tokenizer at {tmp_path}/tokenizer.json" in capsys.readouterr().err
