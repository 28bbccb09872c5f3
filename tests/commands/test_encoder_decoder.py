"""Models with an encoder through the commands: a T5 upcycled, a Switch compressed, both on a mesh."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.compression.spec import parse_layers
from moe_jax.conversion import HuggingFaceDirectory, export, read_hf_config
from moe_jax.core.errors import InputError
from moe_jax.distributed.sharding import make_mesh
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import ModelConfig, config_from_json, config_to_json
from moe_jax.nn.moe import auxiliary_loss, load_per_layer
from tests.support.dense_models import random_leaves, write_model
from tests.support.hf_checkpoints import CONFIGS
from tests.support.tiers import long

QUIET = Console(quiet=True)
T5 = {**CONFIGS["t5"], "num_decoder_layers": 3}
SWITCH = {**CONFIGS["switch_transformers"], "num_layers": 4, "num_sparse_encoder_layers": 2}
# In few layers, so that little is to be compiled.
SHALLOW = {
    **SWITCH,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "num_experts": 4,
}
PESC = ("--method", "pesc", "--adapter", 8, "--rest", "lora:4")
random = np.random.default_rng(0)
TOKENS, INPUTS = (random.integers(1, 64, (8, length)).astype(np.int32) for length in (7, 11))
VALID = np.arange(11)[None] < random.integers(4, 12, (8, 1))


@nnx.jit
def call(model, inputs):
    return model(TOKENS, inputs=inputs, inputs_valid=VALID)


def outputs(source, **options):
    return call(load_model(source, **options), INPUTS)


def logits(source, **options) -> np.ndarray:
    return np.asarray(outputs(source, **options).logits)


def run(*arguments) -> int:
    return cli.main([*map(str, arguments)])


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    config = read_hf_config(T5)
    return write_model(tmp_path_factory.mktemp("t5") / "model", config, random_leaves(config))


@pytest.fixture(scope="module")
def switch(tmp_path_factory):
    config = read_hf_config(SHALLOW)
    return write_model(tmp_path_factory.mktemp("switch") / "model", config, random_leaves(config))


@long
@pytest.mark.parametrize("options", [("--every", 2), PESC])
def test_an_upcycled_t5_gives_its_logits(t5, tmp_path, options, capsys):
    assert run("upcycle", t5, tmp_path / "moe", "--experts", 4, *options) == 0, capsys.readouterr().err
    assert "step-0 difference" in capsys.readouterr().out
    assert run("plan", tmp_path / "moe") == run("inspect", tmp_path / "moe") == 0
    moe = open_source(tmp_path / "moe")
    # Layers 0 and 1 are the encoder's.
    assert moe.config.moe_layers == ((1, 3) if options == ("--every", 2) else (0, 1, 2, 3, 4))
    before, after = logits(ModelDirectory(t5)), outputs(moe)
    np.testing.assert_allclose(after.logits, before, rtol=0, atol=1e-5 * np.abs(before).max())
    load = load_per_layer(moe.config, after.router)
    assert tuple(load) == moe.config.moe_layers and np.isfinite(auxiliary_loss(moe.config, after.router))


@long
def test_what_switch_can_hold_leaves_in_its_format(t5, tmp_path, capsys):
    switch = ("--gate", "top1", "--top-k", 1, "--no-step0-check")
    assert run("upcycle", t5, tmp_path / "switch", "--experts", 4, "--every", 2, *switch) == 0
    assert run("upcycle", t5, tmp_path / "two", "--experts", 4, "--every", 2) == 0
    source = ModelDirectory(tmp_path / "switch")
    export(source, tmp_path / "back", console=QUIET)
    back = HuggingFaceDirectory(tmp_path / "back")
    assert back.config.family == "switch_transformers"
    np.testing.assert_array_equal(logits(back), logits(source))
    capsys.readouterr()
    assert run("export", tmp_path / "two", tmp_path / "none") == 2
    error = capsys.readouterr().err
    assert "no Hugging Face format" in error and "'switch_transformers'" in error and not (tmp_path / "none").exists()


METHODS = {
    "resmoe": ("--keep", 0.5),
    "ders-sparsify": ("--drop", 0.5),
    "ders-quantize": ("--bits", 8),
}


@long
@pytest.mark.parametrize("method", METHODS)
def test_chosen_layers_of_both_stacks_are_compressed(switch, tmp_path, method, capsys):
    chosen = ("--layers", "encoder:1,decoder:top:1")
    assert run("compress", switch, tmp_path / "out", "--method", method, *METHODS[method], *chosen) == 0
    source, out = ModelDirectory(switch), ModelDirectory(tmp_path / "out")
    measured = json.loads((tmp_path / "out" / "lineage.json").read_text())[-1]["measured"]
    assert [layer["layer"] for layer in measured["layers"]] == [1, 3]
    changed = [i for i in source.config.moe_layers if source.config.moe(i).bank != out.config.moe(i).bank]
    assert changed == [1, 3]
    if method != "resmoe":
        return
    before, after = logits(source), logits(out)
    assert 0 < np.abs(after - before).max() < np.abs(before).max()
    export(out, tmp_path / "back", console=QUIET)
    np.testing.assert_allclose(logits(HuggingFaceDirectory(tmp_path / "back")), after, atol=1e-5, rtol=0)


@long  # `compression/methods/test_resmoe.py` has a decoder, of which all is kept too
def test_all_that_is_kept_is_the_model(switch, tmp_path):
    """Whole residuals around a centre, in the encoder and in the decoder: the same logits."""
    assert run("compress", switch, tmp_path / "out", "--method", "resmoe", "--keep", 1.0) == 0
    before = logits(ModelDirectory(switch))
    np.testing.assert_allclose(logits(ModelDirectory(tmp_path / "out")), before, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("encoder:all", (1, 3)),
        ("decoder:0,2", (4, 6)),
        ("encoder:1,3,decoder:top:1", (1, 3, 7)),
        ("decoder:1-2,encoder:0-1", (5, 6, 1)),
        ("top:2", (6, 7)),
        ("1,4", (1, 4)),
    ],
)
def test_layers_are_counted_through_both_stacks_or_in_each(text, layers):
    assert parse_layers(text, read_hf_config(SWITCH)) == layers


@pytest.mark.parametrize("text", ["encoder:", "encoder:4", "encoder:top:3", "decoder:1,encoder", "vision:1"])
def test_layers_that_a_stack_does_not_have(text):
    with pytest.raises(InputError, match="--layers"):
        parse_layers(text, read_hf_config(SWITCH))
    with pytest.raises(InputError, match="--layers"):
        parse_layers("encoder:1", read_hf_config(CONFIGS["mixtral"]))


@long
def test_on_a_mesh_it_is_the_same_model(switch):
    """Also the gradient, with recomputation."""
    source = ModelDirectory(switch)

    def loss_and_gradient(**options):
        graphdef, state = nnx.split(load_model(source, **options))

        def loss(state):
            return jnp.mean(nnx.merge(graphdef, state)(TOKENS, inputs=INPUTS, inputs_valid=VALID).logits ** 2)

        with jax.set_mesh(options.get("mesh") or make_mesh({}, jax.devices()[:1])):
            return jax.jit(jax.value_and_grad(loss))(state)

    one, whole = loss_and_gradient()
    mesh = make_mesh({"data": 1, "fsdp": 2, "expert": 2, "tensor": 2})
    split, parts = loss_and_gradient(mesh=mesh, remat="full")
    np.testing.assert_allclose(split, one, rtol=1e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-4 * np.abs(a).max() + 1e-7, err_msg=str(path))


def test_the_config_travels_and_says_what_does_not_go_together():
    config = read_hf_config(SWITCH)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
    assert config.encoder.layers + config.decoder.layers == config.layers
    for changes, message in (
        ({"num_encoder_layers": 8}, "num_encoder_layers=8 must lie between 0 and 7"),
        ({"num_encoder_layers": 3}, "layer 3 is a decoder's"),
        ({"num_encoder_layers": 5}, "layer 4 is an encoder's"),
        ({"decoder_start_id": None}, "decoder_start_id"),
        ({"decoder_start_id": 64}, "outside the vocabulary"),
        ({"num_encoder_layers": 0}, "decoder_start_id"),
    ):
        with pytest.raises(InputError, match=message):
            dataclasses.replace(config, **changes)
    _two_tables(config)


def _two_tables(config: ModelConfig) -> None:
    attention = config.layers[0].attention
    assert attention.relative_bias is not None
    other = dataclasses.replace(attention.relative_bias, buckets=16)
    first = dataclasses.replace(config.layers[0], attention=dataclasses.replace(attention, relative_bias=other))
    with pytest.raises(InputError, match="layers 0 and 1"):
        dataclasses.replace(config, layers=(first, *config.layers[1:]))


def test_a_call_brings_inputs_or_the_encoders_output(switch):
    model = load_model(ModelDirectory(switch))
    encoded = nnx.jit(lambda model: model.encode(INPUTS, valid=VALID))(model)
    at_once = call(model, INPUTS)
    apart = nnx.jit(lambda model, output, valid: model(TOKENS, encoder_output=output, encoder_valid=valid))(
        model, encoded.output, encoded.valid
    )
    np.testing.assert_array_equal(at_once.logits, apart.logits)
    assert len(at_once.router) == len(encoded.router) + len(apart.router)
    for given, message in (
        ({}, "an encoder's output goes with layers"),
        ({"inputs": INPUTS, "encoder_output": encoded.output}, "not both"),
        ({"encoder_output": encoded.output, "inputs_valid": VALID}, "inputs_valid"),
    ):
        with pytest.raises(InputError, match=message):
            model(TOKENS, **given)


def test_padding_changes_nothing(switch):
    """What is not valid, wherever it stands, has no influence on any logit, nor on what the routers report."""
    model = load_model(ModelDirectory(switch))
    a, b = call(model, INPUTS), call(model, jnp.where(VALID, INPUTS, 63 - INPUTS))
    np.testing.assert_array_equal(a.logits, b.logits)
    chex.assert_trees_all_equal(a.router, b.router)


def test_lora_of_both_stacks_is_named_in_full(t5, tmp_path):
    """A short name would mean the same projection of cross-attention, too, which has no LoRA."""
    lora = ("--method", "lora", "--adapter", "lora:2", "--targets", "q,up", "--no-step0-check")
    assert run("adapt", t5, tmp_path / "tuned", *lora) == 0
    assert run("export", tmp_path / "tuned", tmp_path / "peft", "--format", "peft") == 0
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    blocks = [f"encoder.block.{i}.layer" for i in range(2)], [f"decoder.block.{i}.layer" for i in range(3)]
    names = [name for block in blocks[0] for name in (f"{block}.0.SelfAttention.q", f"{block}.1.DenseReluDense.wi")]
    names += [name for block in blocks[1] for name in (f"{block}.0.SelfAttention.q", f"{block}.2.DenseReluDense.wi")]
    assert written["target_modules"] == names and written["task_type"] == "SEQ_2_SEQ_LM"
