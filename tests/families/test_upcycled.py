"""Dense families upcycled, trained, scored, compressed and generated from, as a user does it with the commands."""

import json
import pathlib

import numpy as np
import pytest

from moe_jax.commands import cli
from moe_jax.files.tokenizer_files import TOKENIZER
from tests.data.test_tiktoken_file import ids_by_ranks, learned_ranks, write_ranks
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.hf_checkpoints import CONFIGS, expected_tensors, write_checkpoint
from tests.support.tiers import long

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 20
RECIPE = """
run_dir = "run"
[model]
path = "upcycled"
[data]
seq_len = 16
sources = [{ path = "text.txt" }]
[optimizer]
learning_rate = 1e-2
[train]
steps = 6
batch_size = 8
"""
DERS = ("--delta", "low-rank:4", "--experts", 4)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    """The current directory, with a text and a recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def output_of(capsys):
    def command(*words) -> str:
        capsys.readouterr()
        assert cli.main([str(word) for word in words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return command


def write_random(folder: pathlib.Path, config: dict, vocab_size: int) -> None:
    """A checkpoint `dense` whose weights, biases and norms are all random."""
    rng = np.random.default_rng(0)
    config = {**config, "num_hidden_layers": 2, "vocab_size": vocab_size}
    tensors = {
        name: (rng.standard_normal(shape) * 0.15 + ("norm" in name or ".ln_" in name)).astype(np.float32)
        for name, shape in expected_tensors(config).items()
    }
    write_checkpoint(folder / "dense", config, tensors)


def perplexity(output_of, model: str) -> float:
    return json.loads(output_of("eval", model, "--text", "text.txt", "--seq-len", 16, "--json"))["perplexity"]


def measured(model: str) -> dict:
    return json.loads(pathlib.Path(model, "lineage.json").read_text())[-1]["measured"]


def generated(output_of, model: str) -> dict:
    given = ("--prompt", "The quick", "--max-new-tokens", 5, "--json")
    return json.loads(output_of("generate", model, *given))[0]


@long
@pytest.mark.parametrize("name", ["stablelm", "phi"])
def test_ders_of_stablelm_and_phi(name, folder, output_of):
    write_random(folder, CONFIGS[name], 264)
    byte_tokenizer(folder / "dense" / TOKENIZER)
    output_of("upcycle", "dense", "upcycled", *DERS)
    assert measured("upcycled")["step0_max_abs_difference"] == 0.0
    before = perplexity(output_of, "upcycled")
    output_of("train", "recipe.toml")
    after = perplexity(output_of, "run/model")
    assert after < 0.9 * before
    output_of("compress", "run/model", "small", "--method", "ders-quantize", "--bits", 4)
    # Deltas of a few steps are small, and so is what their codes leave out.
    assert perplexity(output_of, "small") == pytest.approx(after, rel=0.02)
    assert len(generated(output_of, "small")["ids"]) > 0


@long
def test_pesc_of_the_first_qwen(folder, output_of):
    """With the tokenizer that is made of its vocabulary."""
    ranks = learned_ranks()
    write_random(folder, {**CONFIGS["qwen"], "eos_token_id": len(ranks)}, 832)
    write_ranks(folder / "dense" / "qwen.tiktoken", ranks)
    pesc = ("--method", "pesc", "--experts", 4, "--adapter", 4, "--rest", "lora:2")
    output_of("upcycle", "dense", "upcycled", *pesc)
    assert measured("upcycled")["step0_max_abs_difference"] == 0.0
    before = perplexity(output_of, "upcycled")
    output_of("train", "recipe.toml")
    assert perplexity(output_of, "run/model") < 0.9 * before
    found = generated(output_of, "run/model")
    assert found["prompt_ids"] == ids_by_ranks(ranks, "The quick") and found["text"]
