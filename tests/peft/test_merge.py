"""A merged model computes what the tuned one did, and stands on its own; what cannot be folded is refused or kept."""

import dataclasses
import shutil

import jax.numpy as jnp
import numpy as np

from moe_jax.api.open_source import open_source
from moe_jax.commands import cli
from moe_jax.experts.shapes import AdapterConfig, FFNConfig, LoRAConfig
from moe_jax.model_io.adapter_dir import AdapterDirectoryWriter
from moe_jax.model_io.lineage import new_lineage_entry
from moe_jax.model_io.loading import leaf_specs, load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.model_io.tuned_base import base_config, own_leaves
from moe_jax.models import AttentionConfig, BankConfig, LayerConfig, ModelConfig, MoEConfig
from moe_jax.models.moe_config import PerftConfig
from moe_jax.peft.merge import merge
from tests.support.dense_models import DTYPES, random_leaves, write_model
from tests.support.numerics import logits_of
from tests.support.tiers import long

TOKENS = np.array([[1, 5, 9, 33, 2, 60, 17, 4]])
LORA = LoRAConfig(rank=3, targets=("gate", "up", "down"), scale=0.7)
ATTENTION_LORA = LoRAConfig(rank=2, targets=("q", "k", "v", "o"), scale=1.5)
ROUTER_LORA = LoRAConfig(rank=1, targets=("router",), scale=2.0)
ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, lora=ATTENTION_LORA)
FFN = FFNConfig(dim=24, lora=LORA)
ADAPTER = AdapterConfig(rank=2, activation="gelu", scale=0.25)


def model(*mlps: FFNConfig | MoEConfig, attention: AttentionConfig = ATTENTION) -> ModelConfig:
    layers = tuple(LayerConfig(attention=attention, mlp=mlp) for mlp in mlps)
    return ModelConfig(family="llama", vocab_size=64, d_model=16, max_positions=32, layers=layers, frozen_base=True)


def moe(expert: FFNConfig = FFN, **options) -> MoEConfig:
    return MoEConfig(expert=expert, num_experts=3, top_k=2, **options)


def folds() -> ModelConfig:
    """LoRA beside attention, a router, the base of experts and a universal FFN, over NF4 kernels and stored ones."""
    experts = moe(bank=BankConfig(kind="low-rank", rank=2), universal="med", router_lora=ROUTER_LORA)
    return model(experts, attention=dataclasses.replace(ATTENTION, nf4=True))


def keeps() -> ModelConfig:
    """PERFT, which stays, beside LoRA over the NF4 kernels of full experts, which does not."""
    perft = PerftConfig(variant="routed", adapter=ADAPTER, num_experts=2, top_k=1)
    experts = moe(dataclasses.replace(FFN, nf4=True), perft=perft, router_lora=ROUTER_LORA)
    return model(experts, attention=dataclasses.replace(ATTENTION, lora=None))


def write_adapter(folder, config, dtype="float32"):
    """A base of random numbers, and random numbers over it, B and routers too."""
    leaves = random_leaves(base_config(config), dtype=dtype)
    base = ModelDirectory(write_model(folder / "base", base_config(config), leaves))
    rng = np.random.default_rng(1)
    entry = new_lineage_entry("adapt", {}, [base])
    writer = AdapterDirectoryWriter(
        folder / "adapter", config, base=base, tokenizer_files=base.tokenizer_files, lineage=[entry]
    )
    with writer:
        for path, spec in leaf_specs(config).items():
            if path in own_leaves(config):
                writer.write({path: rng.normal(0, 0.3, spec.shape).astype(DTYPES[dtype])})
    return open_source(folder / "adapter")


def logits(source) -> np.ndarray:
    return np.asarray(logits_of(load_model(source), jnp.asarray(TOKENS)))


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_merged_model_gives_the_logits_of_the_tuned_one(tmp_path, capsys):
    source = write_adapter(tmp_path, folds())
    assert cli.main(["merge", str(source.path), str(tmp_path / "out")]) == 0
    kernels = 4 + 1 + 3 + 3
    said = capsys.readouterr().out
    assert f"LoRA folded into {kernels} kernels" in said and "4 kernels are those" in said

    merged = ModelDirectory(tmp_path / "out")
    assert merged.config == base_config(source.config) and not merged.config.frozen_base
    expected = logits(source)
    np.testing.assert_allclose(logits(merged), expected, atol=1e-5 * np.abs(expected).max())
    assert np.abs(logits(source.base) - expected).max() > 0.1
    lineage = open_source(tmp_path / "out").path / "lineage.json"
    assert '"command": "merge"' in lineage.read_text() and '"command": "adapt"' in lineage.read_text()


@long
def test_lora_of_full_experts_is_folded_expert_by_expert(tmp_path):
    source = write_adapter(tmp_path, model(moe(FFN)))
    assert cli.main(["merge", str(source.path), str(tmp_path / "out")]) == 0
    expected = logits(source)
    np.testing.assert_allclose(logits(ModelDirectory(tmp_path / "out")), expected, atol=1e-5 * np.abs(expected).max())
    assert np.abs(logits(source.base) - expected).max() > 0.1


def test_kernels_are_rounded_once(tmp_path):
    source = write_adapter(tmp_path, model(FFN), dtype="bfloat16")
    merge(source, tmp_path / "out")
    merged, path = ModelDirectory(tmp_path / "out"), "layers/0/mlp/down"
    kernel, a, b = (source.read(f"{path}/{name}").astype(np.float32) for name in ("kernel", "lora/a", "lora/b"))
    found = merged.read(f"{path}/kernel")
    assert found.dtype == DTYPES["bfloat16"]
    np.testing.assert_array_equal(found, (kernel + np.float32(0.7) * (a @ b)).astype(found.dtype))
    np.testing.assert_array_equal(merged.read("embed/embedding"), source.base.read("embed/embedding"))


@long
def test_partly_keeps_adapters_and_needs_no_base(tmp_path, capsys):
    source = write_adapter(tmp_path, keeps())
    expected = logits(source)
    (tmp_path / "base").rename(tmp_path / "moved")
    arguments = ["merge", str(source.path), str(tmp_path / "out"), "--partly", "--base", str(tmp_path / "moved")]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert "LoRA folded into 4 kernels" in said and "kept: PERFT experts (routed) in every layer" in said
    shutil.rmtree(tmp_path / "moved")
    merged = ModelDirectory(tmp_path / "out")
    assert merged.config.layers[0].mlp.perft == source.config.layers[0].mlp.perft
    assert not any("/lora/" in path or "/nf4/" in path for path in merged.specs())
    np.testing.assert_allclose(logits(merged), expected, atol=1e-5 * np.abs(expected).max())
    # It has nothing more to fold.
    assert cli.main(["merge", str(tmp_path / "out"), str(tmp_path / "again"), "--partly"]) == 2
    assert "nothing to merge" in capsys.readouterr().err


def test_what_cannot_be_folded_is_refused_with_the_reason(tmp_path, capsys):
    source = write_adapter(tmp_path, model(moe(bank=BankConfig(kind="adapter", adapter=ADAPTER))))
    before = names(tmp_path)
    assert cli.main(["merge", str(source.path), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for phrase in ("--partly", "adapter experts (PESC) in every layer", "after the FFN", "nonlinear (gelu)"):
        assert phrase in said
    assert cli.main(["merge", str(source.base.path), str(tmp_path / "out")]) == 2
    assert "nothing to merge" in capsys.readouterr().err
    assert cli.main(["merge", str(source.base.path), str(tmp_path / "out"), "--base", str(tmp_path)]) == 2
    assert "adapter directory" in capsys.readouterr().err
    assert cli.main(["merge", str(source.path), str(tmp_path / "base"), "--partly"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert names(tmp_path) == before

    assert cli.main(["merge", str(source.path), str(tmp_path / "out"), "--partly"]) == 0
    merged, path = ModelDirectory(tmp_path / "out"), "layers/0/mlp/experts"
    assert merged.config.layers[0].mlp == dataclasses.replace(source.config.layers[0].mlp, expert=FFNConfig(dim=24))
    np.testing.assert_array_equal(merged.read(f"{path}/adapters/up"), source.read(f"{path}/adapters/up"))
    assert not np.array_equal(merged.read(f"{path}/base/up/kernel"), source.read(f"{path}/base/up/kernel"))
