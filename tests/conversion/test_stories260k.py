"""A real pretrained Llama: Transformers' logits, and what upcycling makes of it.

Its published greedy story is told in `tests/commands/test_generate_command.py`.
"""

import contextlib
import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from moe_jax.commands.cli import main
from moe_jax.conversion import HuggingFaceDirectory
from moe_jax.model_io.loading import load_model
from tests.support.numerics import logits_of
from tests.support.tiers import long


@pytest.fixture(scope="module")
def folder(data_dir):
    return data_dir / "weights" / "stories260K"


@pytest.fixture(scope="module")
def model(folder):
    return load_model(HuggingFaceDirectory(folder / "hf"))


def test_logits_equal_transformers(folder, model, data_dir):
    import torch
    import transformers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "hf" / "tokenizer.json"))
    text = (data_dir / "text" / "tinystories" / "tinystories_sample_2MiB.txt").read_text()[:6000]
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False).ids[: 4 * 256]).reshape(4, 256)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(model, jnp.asarray(tokens, jnp.int32)), expected, atol=1e-4, rtol=0)


RECIPE = """
run_dir = "{folder}/run"
[model]
path = "{folder}/moe"
[data]
seq_len = 128
sources = [{{ path = "{texts}/train.txt" }}]
[optimizer]
learning_rate = 1e-3
[train]
steps = 12
batch_size = 8
[mesh]
fsdp = 8
"""


def command(*words) -> str:
    """Runs a command in this process; its standard output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([str(word) for word in words]) == 0
    return out.getvalue()


def held_out_loss(model, text) -> float:
    return json.loads(command("eval", model, "--text", text, "--seq-len", 128, "--json"))["nll"]


@pytest.fixture(scope="module")
def shakespeare(folder, data_dir, tmp_path_factory):
    """A text to train on, one held out, and what the dense model makes of that."""
    text, texts = (data_dir / "text" / "tinyshakespeare" / "input.txt").read_text(), tmp_path_factory.mktemp("texts")
    (texts / "train.txt").write_text(text[:200_000])
    (texts / "held-out.txt").write_text(text[-4000:])
    return texts, held_out_loss(folder / "hf", texts / "held-out.txt")


@long
def test_upcycled_and_trained_it_beats_the_dense_model_it_came_from(folder, shakespeare, tmp_path):
    """One kind of expert over a mesh; benchmarks/upcycle_stories260k.py trains all kinds, and for longer."""
    texts, dense = shakespeare
    (tmp_path / "recipe.toml").write_text(RECIPE.format(folder=tmp_path, texts=texts))
    moe = ("--experts", 4, "--top-k", 2, "--every", 2, "--delta", "low-rank:4")
    command("upcycle", folder / "hf", tmp_path / "moe", *moe)
    (entry,) = json.loads((tmp_path / "moe" / "lineage.json").read_text())
    assert entry["measured"]["step0_max_abs_difference"] < 1e-5
    command("train", tmp_path / "recipe.toml")
    assert held_out_loss(tmp_path / "run" / "model", texts / "held-out.txt") < dense - 0.5
