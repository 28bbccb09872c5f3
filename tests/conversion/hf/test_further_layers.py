"""Layers behind the last one, which predict tokens after the next: left out, or kept and written again bit for bit."""

import json
from pathlib import Path

import numpy as np
import pytest

import moe_jax
from moe_jax.commands import cli
from moe_jax.conversion import HuggingFaceDirectory, read_hf_config
from moe_jax.conversion.hf_config import write_hf_config
from moe_jax.core.errors import InputError
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.models import config_from_json, config_to_json
from tests.support.hf_checkpoints import CONFIGS, assert_same_bits, random_tensors, read_tensors, write_checkpoint
from tests.support.tiers import long

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "kimi_k2", "deepseek_v32")


def with_further(name: str, count: int = 1, **changes) -> tuple[dict, dict[str, np.ndarray]]:
    """A config and its tensors: those of further layers are named as published, with copies of embedding and head."""
    config = CONFIGS[name] | {"num_nextn_predict_layers": count} | changes
    # A model with more layers has the tensors of layers of the same form.
    last = config["num_hidden_layers"]
    longer = {"num_hidden_layers": last + count, "num_nextn_predict_layers": 0}
    if "mlp_layer_types" in config:
        longer["mlp_layer_types"] = [*config["mlp_layer_types"], *["sparse"] * count]
    more = random_tensors(config | longer)
    width, rng = config["hidden_size"], np.random.default_rng(1)
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    for layer in range(last, last + count):
        place = f"model.layers.{layer}"
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            more[f"{place}.{norm}.weight"] = (1 + 0.1 * rng.normal(size=width)).astype(np.float32)
        more[f"{place}.eh_proj.weight"] = rng.normal(0, 0.1, (width, 2 * width)).astype(np.float32)
        more[f"{place}.embed_tokens.weight"] = more["model.embed_tokens.weight"]
        more[f"{place}.shared_head.head.weight"] = more[head]
    return config, more


@pytest.mark.parametrize("name", ["deepseek_v3", *(pytest.param(one, marks=long) for one in FAMILIES[1:])])
def test_they_are_kept_bit_for_bit(name, tmp_path):
    config, tensors = with_further(name, count=2 if name == "deepseek_v3" else 1)
    write_checkpoint(tmp_path / "hf", config, tensors)
    model = moe_jax.convert(tmp_path / "hf", tmp_path / "model", further="keep")
    count = config["num_nextn_predict_layers"]
    assert model.config.further_layers == count
    assert model.source.read("further/0/joint/kernel").shape == (2 * config["hidden_size"], config["hidden_size"])
    moe_jax.export(model, tmp_path / "out")
    assert_same_bits(read_tensors(tmp_path / "out"), tensors)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == count
    # By default they are left out, as before, and nothing else changes.
    plain = HuggingFaceDirectory(tmp_path / "hf")
    assert plain.config.further_layers == 0 and len(plain.weights.ignored) > 10
    kept = HuggingFaceDirectory(tmp_path / "out", further=True)
    assert kept.config == model.config and not kept.weights.ignored


def test_copies_that_differ_are_an_error_and_absent_ones_are_not(tmp_path):
    config, tensors = with_further("deepseek_v3")
    copy = "model.layers.3.shared_head.head.weight"
    write_checkpoint(tmp_path / "differs", config, tensors | {copy: tensors[copy] + 1})
    with pytest.raises(InputError, match="--further leave"):
        moe_jax.convert(tmp_path / "differs", further="keep")
    write_checkpoint(tmp_path / "absent", config, {name: one for name, one in tensors.items() if name != copy})
    assert moe_jax.convert(tmp_path / "absent", further="keep").config.further_layers == 1


@long
def test_the_model_computes_the_same_with_them(tmp_path):
    config, tensors = with_further("deepseek_v3")
    write_checkpoint(tmp_path / "hf", config, tensors)
    tokens = np.arange(1, 9)[None]
    kept, left = (moe_jax.convert(tmp_path / "hf", further=further) for further in ("keep", "leave"))
    np.testing.assert_array_equal(kept(tokens).logits, left(tokens).logits)


def test_configs_say_how_many_there_are():
    keys = CONFIGS["glm4_moe"] | {"num_nextn_predict_layers": 1}
    kept = read_hf_config(keys, further=True)
    assert kept.further_layers == 1 and write_hf_config(kept)["num_nextn_predict_layers"] == 1
    assert config_from_json(config_to_json(kept)) == kept
    assert read_hf_config(keys).further_layers == 0 and "further_layers" not in config_to_json(read_hf_config(keys))


@pytest.mark.parametrize("name", ["mixtral", "ernie4_5_moe", "glm_moe_dsa"])
def test_other_families_have_none_that_are_known(name):
    with pytest.raises(InputError, match="--further keep"):
        read_hf_config(CONFIGS[name], further=True)


def test_what_does_not_know_them_says_so(tmp_path, capsys):
    config, tensors = with_further("deepseek_v3")
    write_checkpoint(tmp_path / "hf", config, tensors)
    model = moe_jax.convert(tmp_path / "hf", tmp_path / "model", further="keep")
    for verb, options in (
        (moe_jax.upcycle, {}),
        (moe_jax.compress, {"method": "mobe"}),
        (moe_jax.adapt, {"method": "lora", "adapter": "lora:2", "targets": "q_up"}),
    ):
        with pytest.raises(InputError, match="further_layers=1"):
            verb(model, **options)
    with pytest.raises(InputError, match="further_layers=1"):
        moe_jax.export(model, tmp_path / "codes", format="compressed-tensors", bits=4)
    with pytest.raises(InputError, match="further"):
        moe_jax.export(model, tmp_path / "model.gguf", format="gguf")
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "x"), "--further", "keep", "--dry-run"]) == 0
    assert "further/0/block/mlp/experts/up/kernel" in capsys.readouterr().out
    assert ModelDirectory(Path(tmp_path / "model")).lineage[-1]["options"]["further"] == "keep"
