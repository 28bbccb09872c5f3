"""Larger MoEs of published families: step 0, Transformers' logits of what is exported, training, and the command."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

import moe_jax
from moe_jax.commands import cli
from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.experts import BankConfig
from moe_jax.model_io.in_memory import InMemory
from moe_jax.model_io.loading import load_model
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.nn.filters import experts as of_experts
from moe_jax.upcycling import UpcycleSpec, upcycle
from moe_jax.upcycling.expert_demand import measure_demand
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.hf_checkpoints import CONFIGS, random_tensors, write_checkpoint
from tests.support.moe_models import memory_moe
from tests.support.tiers import long

TOKENS = np.random.default_rng(0).integers(1, 60, (2, 20))
FAMILIES = ("deepseek_v3", "mixtral", "olmoe", "qwen3_moe", "ernie4_5_moe", "gpt_oss", "llama4_text", "gemma4_text")


def write(folder: Path, name: str) -> Path:
    return write_checkpoint(folder, CONFIGS[name], random_tensors(CONFIGS[name]))


def reference(folder: Path) -> np.ndarray:
    """Transformers' logits of a checkpoint."""
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


@long
@pytest.mark.parametrize("name", FAMILIES)
def test_families_keep_their_logits_with_twice_the_experts_and_are_exported(name, tmp_path):
    source = moe_jax.load(write(tmp_path / "hf", name))
    larger = moe_jax.upcycle(source, router_noise=0.0)
    assert larger.report.differs is None and larger.report.step0.equal
    layer = source.config.moe_layers[-1]
    before, after = source.config.moe(layer), larger.config.moe(layer)
    times = 1 if before.weighs_inputs else 2
    assert (after.num_experts, after.top_k) == (2 * before.num_experts, times * before.top_k)
    moe_jax.export(larger, tmp_path / "out")
    expected = reference(tmp_path / "hf")
    np.testing.assert_allclose(reference(tmp_path / "out"), expected, atol=2e-5 * np.abs(expected).max())
    again = moe_jax.load(tmp_path / "out")
    for path in larger.source.specs():
        assert again.source.read(path).tobytes() == larger.source.read(path).tobytes(), path


@long
@pytest.mark.parametrize("name", FAMILIES[:4])
def test_copies_part_in_training(name, tmp_path):
    larger = moe_jax.upcycle(moe_jax.load(write(tmp_path / "hf", name)))
    assert 0 < larger.report.step0.difference < 0.5 * larger.report.step0.largest
    assert "noise 0.01" in larger.report.differs
    rows, losses = [np.random.default_rng(1).integers(1, 60, (8, 17))] * 4, []
    recipe = {"optimizer": {"learning_rate": 1e-3, "weight_decay": 0.0}}
    trained = moe_jax.train(recipe, larger, rows, on_step=lambda record: losses.append(record["loss"]))
    assert losses[-1] < losses[0]
    layer = trained.config.moe_layers[-1]
    first, kernel = (model.source.read(f"layers/{layer}/mlp/experts/up/kernel") for model in (larger, trained))
    half = len(kernel) // 2
    # Few tokens reach few experts: an expert has parted from its copy if anything reached it.
    moved = np.abs(kernel - first).max(axis=(1, 2))[:half] > 0
    np.testing.assert_array_equal(np.abs(kernel[:half] - kernel[half:]).max(axis=(1, 2)) > 1e-6, moved)
    assert moved.sum() > half // 2


def test_copies_by_demand_are_of_the_layer_that_called_for_them():
    source, target = memory_moe(BankConfig(), BankConfig()), InMemory()
    demand = {0: np.array([1.0, 9.0, 1.0]), 1: np.array([4.0, 0.0, 4.0])}
    spec = UpcycleSpec(experts=5, copies_by="use", text="text.txt", shared_from="mean", step0_check=False, noise=0.1)
    made = upcycle(source, target, spec, demand=demand)
    assert made.copies == {0: (1, 3, 1), 1: (2, 1, 2)} and "different numbers" in str(made.differs)
    assert made.config.moe(0).top_k == source.config.moe(0).top_k and made.config.moe(0).universal == "one"
    for layer, of in ((0, [0, 1, 2, 1, 1]), (1, [0, 1, 2, 0, 2])):
        for name in ("gate", "up", "down"):
            kernel = source.read(f"layers/{layer}/mlp/experts/{name}/kernel")
            found = target.source.read(f"layers/{layer}/mlp/experts/{name}/kernel")
            np.testing.assert_array_equal(found[:3], kernel)
            noise = (found - kernel[of])[3:]
            np.testing.assert_allclose(noise.std() / kernel[of].std(), 0.1, rtol=0.15)
            mean = target.source.read(f"layers/{layer}/mlp/universal/{name}/kernel")
            np.testing.assert_allclose(mean, kernel.mean(axis=0), atol=1e-6)
        router = source.read(f"layers/{layer}/mlp/router/kernel")
        found = target.source.read(f"layers/{layer}/mlp/router/kernel")
        np.testing.assert_array_equal(found[:, :3], router)
        assert 0 < np.abs(found - router[:, of]).max() < 0.1 * router.std()
    (entry,) = target.source.lineage
    assert entry["options"]["copies"] == {"0": (1, 3, 1), "1": (2, 1, 2)}


def rows_of(length: int = 12) -> CalibrationRows:
    rows = CalibrationRows.of_windows(np.random.default_rng(2).integers(1, 40, (3, length)))
    rows.valid[2, 7:] = False
    rows.weights[2, 6:] = 0
    return rows


@long
def test_use_counts_the_tokens_that_go_to_an_expert():
    source, rows = memory_moe(BankConfig(), None, BankConfig(), num_experts=4), rows_of()
    found, model = measure_demand(source, rows, by="use"), load_model(source)
    routing = model(rows.tokens, segment_ids=rows.valid.astype(np.int32), routing=True).routing
    assert found.keys() == routing.keys() == {0, 2}
    for layer, each in found.items():
        counts = np.bincount(np.asarray(routing[layer].experts)[rows.valid].ravel(), minlength=4)
        np.testing.assert_allclose(each, counts / 2, rtol=1e-6)


@long
@pytest.mark.parametrize("bank", [BankConfig(), BankConfig(kind="low-rank", rank=2)], ids=["full", "low-rank"])
def test_gradients_are_those_of_each_experts_own_parameters(bank):
    source, rows = memory_moe(bank, bank, num_experts=3, balance_coef=7.0), rows_of()
    found, model = measure_demand(source, rows, by="gradient"), load_model(source)
    squares = {0: np.zeros(3), 1: np.zeros(3)}
    for row in range(3):

        def loss(model, row=row):
            logits = model(rows.tokens[row : row + 1], segment_ids=rows.valid[row : row + 1].astype(np.int32)).logits
            likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits[0]), rows.targets[row][:, None], axis=-1)[:, 0]
            return -jnp.sum(likelihood * rows.weights[row]) / rows.weights[row].sum()

        gradient = nnx.grad(loss, argnums=nnx.DiffState(0, of_experts))(model)
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
            if "base" not in str(path):
                for layer in (0, 1):
                    squares[layer] += np.square(np.asarray(leaf[layer], np.float64)).reshape(3, -1).sum(axis=1)
    for layer, each in found.items():
        np.testing.assert_allclose(each, np.sqrt(squares[layer]), rtol=1e-4)


@long
@pytest.mark.parametrize("by", ["use", "gradient"])
def test_the_command_measures_and_writes_what_it_did(by, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = CONFIGS["olmoe"] | {"vocab_size": 264}
    write_checkpoint(tmp_path / "hf", config, random_tensors(config))
    byte_tokenizer(tmp_path / "hf" / "tokenizer.json")
    Path("text.txt").write_text("A line of a text that experts are measured on. " * 10)
    given = ["--experts", "6", "--copies-by", by, "--text", "text.txt"]
    assert cli.main(["upcycle", "hf", "large", *given]) == 0
    printed = capsys.readouterr().out
    assert "6, 2 per token" in printed and "1 to " in printed and "different numbers of copies" in printed
    entry = json.loads(Path("large/lineage.json").read_text())[-1]
    assert entry["options"]["copies_by"] == by and entry["options"]["router_noise"] == 0.01
    assert all(sum(each) == 6 and min(each) >= 1 for each in entry["options"]["copies"].values())
    measured = entry["measured"]
    assert measured["step0_max_abs_difference"] > measured["step0_allowed"] and "step0_differs" in measured
    large, source = ModelDirectory(Path("large")), moe_jax.load("hf").source
    assert large.config.moe(0).num_experts == 6
    assert (
        large.read("layers/1/mlp/experts/up/kernel")[:4].tobytes()
        == source.read("layers/1/mlp/experts/up/kernel").tobytes()
    )
    assert cli.main(["plan", "hf", "--experts", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_params"] > measured["dense_params"]
