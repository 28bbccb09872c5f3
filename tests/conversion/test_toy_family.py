"""A family of models is one description: one that is defined here is converted, upcycled and exported."""

import json

import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.conversion.families import FAMILIES
from moe_jax.conversion.families.family import Family
from moe_jax.conversion.families.usual import (
    dense_ffn,
    read_attention,
    read_decoder,
    read_gated_ffn,
    repeat_layers,
    write_decoder,
    write_ffn,
)
from moe_jax.conversion.table import Row, linear, norm
from moe_jax.model_io.loading import load_model
from tests.support.hf_checkpoints import BASE, assert_same_bits, random_tensors, read_tensors, write_checkpoint
from tests.support.numerics import logits_of

TOKENS = np.array([[1, 5, 9, 33, 2, 60, 17, 4]])


def read(config):
    ffn = read_gated_ffn(config)
    return read_decoder(config, "toy", repeat_layers(config, read_attention(config), ffn))


def write(config):
    return {**write_decoder(config), **write_ffn(dense_ffn(config))}


# It computes what Llama does; its tensors have other names, and its embedding lies on its side.
TOY = Family(
    name="toy",
    architecture="ToyForCausalLM",
    defaults={"rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2},
    read=read,
    write=write,
    table=(
        Row("words", "embed/embedding", transpose=True),
        *norm("body.{i}.before", "layers/{i}/attention_norm"),
        *(row for name in "qkvo" for row in linear(f"body.{{i}}.mix.{name}", f"layers/{{i}}/attention/{name}")),
        *norm("body.{i}.between", "layers/{i}/mlp_norm"),
        *(row for name in ("gate", "up", "down") for row in linear(f"body.{{i}}.{name}", f"layers/{{i}}/mlp/{name}")),
        *norm("after", "final_norm"),
        *linear("out", "lm_head"),
    ),
    moe_formats=("mixtral",),
    own_code=True,
)
CONFIG = {**BASE, "model_type": "toy"}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(FAMILIES, TOY.name, TOY)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_checkpoint(tmp_path / "toy", CONFIG, random_tensors(CONFIG))


def logits(folder):
    return np.asarray(logits_of(load_model(open_source(folder)), TOKENS))


def test_it_is_converted_and_leaves_as_it_came(checkpoint, tmp_path):
    assert cli.main(["convert", "toy", "ours"]) == 0
    assert cli.main(["export", "ours", "back"]) == 0
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(checkpoint))
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: written[key] for key in CONFIG} == CONFIG and written["architectures"] == ["ToyForCausalLM"]
    # What computes the same in a family of the library's gives the same logits.
    llama = {**CONFIG, "model_type": "llama"}
    names = dict(zip(random_tensors(CONFIG), random_tensors(llama), strict=True))
    tensors = {names[name]: array for name, array in read_tensors(checkpoint).items()}
    tensors["model.embed_tokens.weight"] = np.ascontiguousarray(tensors["model.embed_tokens.weight"].T)
    write_checkpoint(tmp_path / "llama", llama, tensors)
    np.testing.assert_array_equal(logits(tmp_path / "ours"), logits(tmp_path / "llama"))


def test_it_becomes_an_moe_that_leaves_in_the_format_that_it_names(checkpoint, tmp_path):
    assert cli.main(["upcycle", "toy", "moe", "--experts", "4", "--top-k", "2", "--no-step0-check"]) == 0
    assert cli.main(["export", "moe", "hf"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "mixtral"
    np.testing.assert_allclose(logits(tmp_path / "hf"), logits(checkpoint), atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "named"), [("parallel_blocks", True, "parallel_blocks"), ("hidden_act", "swoosh", "swoosh")]
)
def test_what_it_does_not_know_is_refused_by_its_name(checkpoint, capsys, key, value, named):
    (checkpoint / "config.json").write_text(json.dumps({**CONFIG, key: value}))
    assert cli.main(["convert", "toy", "ours"]) == 2
    assert named in capsys.readouterr().err


def test_a_tensor_that_it_does_not_know_is_refused_by_its_name(checkpoint, tmp_path, capsys):
    write_checkpoint(checkpoint, CONFIG, {**read_tensors(checkpoint), "body.0.extra": np.zeros(3, np.float32)})
    assert cli.main(["convert", "toy", "ours"]) == 2
    assert "body.0.extra" in capsys.readouterr().err
