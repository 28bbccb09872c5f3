"""Compressed models go back to the format they came from: the same logits in Transformers."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.compression.source_layer import SourceLayer
from moe_jax.compression.spec import METHODS
from moe_jax.compression.stream import compress
from moe_jax.conversion import export, read_hf_config
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import BankConfig, FFNConfig
from tests.conversion.hf.test_hf_view import write_model
from tests.support.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves
from tests.support.dense_models import write_model as write_leaves
from tests.support.hf_checkpoints import CONFIGS
from tests.support.moe_models import RECIPE, MemorySource, moe_config, trained_leaves
from tests.support.numerics import logits_of
from tests.support.tiers import long

QUIET = Console(quiet=True)
TOKENS = np.array([[1, 5, 9, 33, 2, 60, 17, 4, 4, 21, 8, 50]])


def logits(source) -> np.ndarray:
    return np.asarray(logits_of(load_model(source), jnp.asarray(TOKENS)))


@pytest.fixture(scope="module")
def source():
    config = read_hf_config(CONFIGS["mixtral"])
    return MemorySource(config, random_leaves(config))


def compressed_by_layer(source, methods, folder) -> ModelDirectory:
    """Layer i by `methods[i]`; None: not at all."""
    for layer, method in enumerate(methods):
        if method is not None:
            name, options = method
            compress(source, folder / f"out{layer}", METHODS[name](**options), layers=[layer], described={})
            source = ModelDirectory(folder / f"out{layer}")
    return source


def theirs(folder) -> np.ndarray:
    import torch
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.numpy()


@long
def test_transformers_gives_the_logits_of_the_compressed_model(source, tmp_path):
    """A method per layer: places and quantised values, merged, and narrower than the format's one width for all."""
    methods = [("up", {"keep": 0.5, "bits": 8}), ("msmoe", {"keep": 0.5}), ("sp", {"keep": 0.5, "design": "separate"})]
    out = compressed_by_layer(source, methods, tmp_path)
    export(out, tmp_path / "hf", console=QUIET)
    assert open_source(tmp_path / "hf").config == source.config
    assert np.abs(logits(out) - theirs(tmp_path / "hf")).max() < 1e-4


@long
@pytest.mark.parametrize("name", ["qwen2_moe-dense-layers", "qwen3_moe-dense-layers"])
def test_dense_layers_and_shared_experts_stay_beside_compressed_experts(name, tmp_path):
    config = read_hf_config(CONFIGS[name])
    methods = [None, ("resmoe", {"keep": 0.25}), None, None, None, ("ders-quantize", {"bits": 2})]
    out = compressed_by_layer(MemorySource(config, random_leaves(config)), methods, tmp_path)
    export(out, tmp_path / "hf", console=QUIET)
    assert open_source(tmp_path / "hf").config == config
    expected = theirs(tmp_path / "hf")
    assert np.abs(logits(out) - expected).max() < 2e-5 * np.abs(expected).max()


def test_banks_without_a_base_are_written_as_full_experts(source, tmp_path):
    methods = [("svd", {"keep": 0.5}), ("svd", {"keep": 0.5, "design": "separate"}), ("quantize", {"bits": 3})]
    out = compressed_by_layer(source, methods, tmp_path)
    export(out, tmp_path / "hf", console=QUIET)
    exported = open_source(tmp_path / "hf")
    assert exported.config == source.config
    for layer in range(3):
        for name in ("gate", "up", "down"):
            expected = np.stack(list(SourceLayer(out, layer).kernels(name)))
            found = exported.read(f"layers/{layer}/mlp/experts/{name}/kernel")
            assert found.dtype == np.float32 and np.array_equal(found, expected)


def test_experts_that_are_narrower_everywhere_are_written_so(tmp_path):
    config = read_hf_config(CONFIGS["olmoe"])
    source = MemorySource(config, random_leaves(config))
    compress(source, tmp_path / "out", METHODS["mlp-fusion"](keep=0.5), described={})
    out = ModelDirectory(tmp_path / "out")
    export(out, tmp_path / "hf", console=QUIET)
    width = source.config.layers[0].mlp.expert.dim
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["intermediate_size"] == width // 2
    down = "layers/0/mlp/experts/down/kernel"
    assert np.array_equal(open_source(tmp_path / "hf").read(down), out.read(down))


def test_merged_experts_are_written_for_every_output_of_the_router(source, tmp_path):
    compress(source, tmp_path / "out", METHODS["meo"](keep=0.5), described={})
    out = ModelDirectory(tmp_path / "out")
    console = Console(record=True, width=200, file=(tmp_path / "log").open("w"))
    export(out, tmp_path / "hf", console=console)
    assert "are written once for every output of the router" in console.export_text()
    groups = out.read("layers/1/mlp/groups")
    stored = out.read("layers/1/mlp/experts/up/kernel")
    exported = open_source(tmp_path / "hf").read("layers/1/mlp/experts/up/kernel")
    assert len(stored) < len(exported) and np.array_equal(exported, stored[groups])


def test_upcycled_experts_narrower_than_dense_layers_get_zeros(tmp_path):
    config = read_hf_config(CONFIGS["llama"])
    moe = read_hf_config(CONFIGS["mixtral"]).layers[0].mlp
    moe = dataclasses.replace(moe, expert=FFNConfig(dim=16), bank=BankConfig(), num_experts=4, top_k=2)
    layers = (config.layers[0], dataclasses.replace(config.layers[1], mlp=moe), config.layers[2])
    narrow = write_model(tmp_path / "ours", dataclasses.replace(config, layers=layers))
    export(narrow, tmp_path / "hf", console=QUIET)
    exported, before = open_source(tmp_path / "hf"), narrow.read("layers/1/mlp/experts/down/kernel")
    up, down = (exported.read(f"layers/1/mlp/experts/{name}/kernel") for name in ("up", "down"))
    assert up.shape[2] == down.shape[1] == config.layers[0].mlp.dim and not up[:, :, 16:].any()
    assert np.array_equal(down[:, :16], before) and not down[:, 16:].any()


@long
def test_merged_and_narrower_experts_generate_and_train(tmp_path, capsys):
    """Both at once, in a model of one layer; the others are banks that have tests of their own."""
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    dense = dataclasses.replace(dense_config(num_layers=1), vocab_size=264, bos_id=BOS, eos_ids=(EOS,))
    moe = moe_config(dense, BankConfig(), num_experts=4)
    leaves = trained_leaves(moe, random_leaves(dense))
    written = ModelDirectory(write_leaves(tmp_path / "moe", moe, leaves, (tokenizer,)))
    compress(written, tmp_path / "merged", METHODS["msmoe"](keep=0.5), described={})
    compress(ModelDirectory(tmp_path / "merged"), tmp_path / "out", METHODS["sp"](keep=0.5), described={})
    before = ModelDirectory(tmp_path / "out")
    assert before.specs()["layers/0/mlp/experts/down/kernel"].shape == (2, 12, 16)

    words = ("--prompt", "All", "--max-new-tokens", "4", "--temperature", "0")
    assert cli.main(["generate", str(tmp_path / "out"), *words]) == 0
    assert capsys.readouterr().out.startswith("All")
    (tmp_path / "text.txt").write_text("All the world is a stage, and all the men and women merely players. " * 10)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(folder=tmp_path))
    assert cli.main(["train", str(tmp_path / "recipe.toml")]) == 0, capsys.readouterr().err
    after = ModelDirectory(tmp_path / "run" / "model")
    assert after.config.layers == before.config.layers
    for changes, path in ((True, "experts/up/kernel"), (False, "groups")):
        one, other = (model.read(f"layers/0/mlp/{path}") for model in (before, after))
        assert np.array_equal(one, other) != changes
