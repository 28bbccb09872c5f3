"""PESC: adapter experts after the FFNs of a dense model, and what becomes of the dense model itself."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.experts import AdapterConfig, LoRAConfig
from moe_jax.model_io.adapter_dir import AdapterDirectory
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.model_io.tuned_base import own_leaves
from moe_jax.models import MoEConfig
from moe_jax.peft.adapt import initial_leaf
from moe_jax.upcycling import DenseParameters, UpcycleSpec, dense_to_moe, parse_rest, upcycle, upcycled_config
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.numerics import logits_of

SMALL = UpcycleSpec(method="pesc", experts=4, adapter=4)
RESTS = {"qlora:3": DenseParameters(kind="qlora", rank=3), "lora:3": DenseParameters(kind="lora", rank=3)}
RESTS |= {"frozen": DenseParameters(kind="frozen"), "full": DenseParameters()}


@pytest.mark.parametrize("text", RESTS)
def test_rests_are_read(text):
    assert parse_rest(text) == RESTS[text]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qlora", "qlora:R, lora:R, frozen, full"),
        ("full:3", "unknown --rest 'full:3'"),
        ("froze", "did you mean 'frozen'"),
        ("lora:x", "whole number"),
        ("lora:0", "rank 0 must .* least 1"),
    ],
)
def test_other_rests_are_refused(text, message):
    with pytest.raises(InputError, match=message):
        parse_rest(text)


def test_pesc_is_camelidaes_unless_said_otherwise():
    config = upcycled_config(dense_config(), UpcycleSpec(method="pesc"))
    assert config.moe_layers == (0, 1, 2, 3) and config.frozen_base
    layer = config.layers[0]
    lora = {"rank": 64, "scale": 0.25, "dropout": 0.1}
    assert layer.attention.nf4 and layer.attention.lora == LoRAConfig(targets=("q", "k", "v", "o"), **lora)
    assert layer.mlp.expert.nf4 and layer.mlp.expert.lora == LoRAConfig(targets=("gate", "up", "down"), **lora)
    assert layer.mlp.bank.form.adapter == AdapterConfig(rank=512, activation="gelu", scale=0.25, dropout=0.1)
    assert (layer.mlp.num_experts, layer.mlp.top_k, layer.mlp.balance_coef) == (8, 2, 0.01)


def test_layers_without_adapters_are_frozen_and_tuned_like_the_others():
    config = upcycled_config(dense_config(gated=False), dataclasses.replace(SMALL, every=2, rest=RESTS["lora:3"]))
    assert config.moe_layers == (1, 3)
    for layer in config.layers:
        ffn = layer.mlp.expert if isinstance(layer.mlp, MoEConfig) else layer.mlp
        assert ffn.lora.targets == ("up", "down") and ffn.lora.scale == 16 / 3
        assert not ffn.nf4 and not layer.attention.nf4 and layer.attention.lora.rank == 3
    frozen = upcycled_config(dense_config(), dataclasses.replace(SMALL, rest=RESTS["frozen"]))
    assert frozen.frozen_base and frozen.layers[0].attention == dense_config().layers[0].attention
    full = upcycled_config(dense_config(), dataclasses.replace(SMALL, rest=RESTS["full"]))
    assert not full.frozen_base and full.layers == frozen.layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": None, "adapter": None, "rest": RESTS["qlora:3"]}, "--rest goes with --method pesc only"),
        ({"gate": "softmax_topk"}, "--gate does not go"),
        ({"universal": "coder"}, "--universal does not go"),
        ({"adapter": "wide"}, "--adapter 'wide'"),
        ({"top_k": 9}, "top_k=9 is above num_experts=4"),
    ],
)
def test_what_does_not_go_with_pesc_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        upcycled_config(dense_config(), dataclasses.replace(SMALL, **changes))


def test_a_model_that_is_tuned_already_is_refused():
    dense = dense_config()
    attention = dataclasses.replace(dense.layers[0].attention, lora=LoRAConfig(rank=1, targets=("q",)))
    layers = (dataclasses.replace(dense.layers[0], attention=attention), *dense.layers[1:])
    with pytest.raises(InputError, match="adapters or NF4 kernels already"):
        upcycled_config(dataclasses.replace(dense, layers=layers), SMALL)


@pytest.mark.parametrize(("text", "every"), [("qlora:3", 1), ("full", 2)])
def test_it_starts_as_the_dense_model_exactly(text, every, dense_model, tmp_path):
    """A bfloat16 model with biases."""
    dense, dst = ModelDirectory(dense_model), tmp_path / "pesc"
    result = upcycle(dense, dst, dataclasses.replace(SMALL, every=every, rest=text, seed=1))
    assert result.step0.difference == 0.0 and result.step0.largest > 0.1
    # Quantising 16 x 24 kernels to four bits is no small change; it is told apart from the step.
    assert (result.quantization is not None) == (text == "qlora:3")
    assert result.quantization is None or result.quantization.difference > 1e-3

    tuned = open_source(dst)
    assert tuned.config == result.config and isinstance(tuned, AdapterDirectory) == (text != "full")
    assert (dst / "params").exists() == (text == "full")
    own = {path: tuned.read(path) for path in own_leaves(tuned.config)}
    assert all(not leaf.any() for path, leaf in own.items() if path.endswith(("/up", "/b")))
    sizes = [result.dense.params, result.upcycled.params, sum(leaf.size for leaf in own.values())]
    assert sizes[0] + sizes[2] == sizes[1]
    assert result.own is None if text == "full" else result.own.params == sizes[2]

    measured = json.loads((dst / "lineage.json").read_text())[-1]["measured"]
    assert measured["step0_max_abs_difference"] == 0.0 and measured["total_params"] == sizes[1]
    assert ("nf4_max_abs_difference" in measured) == (text == "qlora:3")
    assert measured.get("adapter_params") == (None if text == "full" else sizes[2])
    assert (dst / "tokenizer.json").read_text() == "{}"


def test_a_wrong_leaf_fails_the_check_and_leaves_nothing(dense_model, tmp_path, monkeypatch):
    def wrong(path, spec, seed):
        return initial_leaf(path, spec, seed) + np.asarray(0.1 * path.endswith("1/mlp/experts/adapters/up"), spec.dtype)

    monkeypatch.setattr(dense_to_moe, "initial_leaf", wrong)
    options = dataclasses.replace(SMALL, layers=(1,), rest=RESTS["frozen"])
    with pytest.raises(InputError, match="logits differ"):
        upcycle(ModelDirectory(dense_model), tmp_path / "pesc", options)
    assert list(tmp_path.iterdir()) == []


def test_stories260k_keeps_its_logits_when_it_is_loaded(data_dir, tmp_path):
    source = data_dir / "weights" / "stories260K" / "hf"
    options = ("--method", "pesc", "--experts", "4", "--adapter", "8", "--rest", "lora:2", "--no-step0-check")
    assert cli.main(["upcycle", str(source), str(tmp_path / "pesc"), *options]) == 0
    dense, tuned = open_source(source), open_source(tmp_path / "pesc")
    assert tuned.base.path == source.resolve() and tuned.config.moe_layers == (0, 1, 2, 3, 4)
    tokens = jnp.arange(48, dtype=jnp.int32).reshape(2, 24) * 7 % dense.config.vocab_size
    before, after = (logits_of(load_model(model), tokens) for model in (dense, tuned))
    assert float(jnp.abs(before).max()) > 1 and np.array_equal(before, after)


def test_dtypes_of_a_mixed_checkpoint_are_kept(tmp_path):
    config = dense_config(num_layers=1)
    leaves = random_leaves(config)
    leaves["layers/0/mlp/up/kernel"] = leaves["layers/0/mlp/up/kernel"].astype(jnp.bfloat16)
    source = ModelDirectory(write_model(tmp_path / "dense", config, leaves))
    for rest in ("frozen", "full"):
        result = upcycle(source, tmp_path / rest, dataclasses.replace(SMALL, rest=rest, step0_check=False))
        specs = open_source(tmp_path / rest).specs()
        halved = {path for path, spec in specs.items() if spec.dtype == jnp.bfloat16}
        assert halved == {"layers/0/mlp/experts/base/up/kernel"}
        assert result.upcycled.bytes == sum(spec.size * spec.dtype.itemsize for spec in specs.values())
