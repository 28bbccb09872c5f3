"""`moe-jax plan --platform`: what the cost model would choose on a chip, and the arithmetic behind it."""

import dataclasses
import json

import pytest

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.data_sheets import CHIPS
from moe_jax.core.errors import InputError
from moe_jax.models import AdapterConfig, BankConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig, config_to_json
from moe_jax.planning.model_costs import DECODED, TOKENS, planned_strategies
from tests.planning.test_plan import dense_model

D, F, E, K = 4096, 11008, 8, 2
SIZE = 3 * D * F


def model(*banks: BankConfig, **options) -> ModelConfig:
    """A dense layer, then one for every bank."""
    config = dense_model(D, F, 1, dtype="bfloat16")
    expert = FFNConfig(dim=F, **options)
    moes = (MoEConfig(expert=expert, num_experts=E, top_k=K, bank=bank) for bank in banks)
    attention = config.layers[0].attention
    layers = tuple(LayerConfig(attention=attention, mlp=moe) for moe in moes)
    return dataclasses.replace(config, layers=(*config.layers, *layers))


def planned(config: ModelConfig, platform: str, **options):
    """By the layer's first index and use."""
    return {(layer.layers[0], layer.use): layer for layer in planned_strategies(config, platform, **options).layers}


@pytest.mark.parametrize("name", ["v5e", "h100"])
def test_whole_kernels_take_their_products_and_their_bytes(name):
    chip, found = CHIPS[name], planned(model(BankConfig()), name)
    training, decoding = found[1, "training"], found[1, "decoding"]
    assert (training.tokens, decoding.tokens) == (TOKENS, DECODED) == (8192, 8)
    time = training.times["grouped"]
    assert list(training.times) == [training.chosen] == ["grouped"]
    assert time.products == pytest.approx(1e6 * 2 * TOKENS * K * SIZE / chip.bfloat16)
    assert time.bytes == pytest.approx(1e6 * 2 * E * SIZE / chip.bandwidth)
    assert time.making == 0 and time.total == pytest.approx(time.products + time.bytes)
    assert time.bound == "products"
    # A few rows meet most experts, and reading those is all that counts.
    few = decoding.times["grouped"]
    assert few.bound == "bytes"
    assert few.bytes == pytest.approx(time.bytes * (1 - (1 - K / E) ** DECODED))


def test_what_is_chosen_depends_on_the_load_and_on_the_chip():
    config = model(BankConfig(kind="low-rank", rank=16), BankConfig(kind="quantized", bits=2, group_size=128))
    found = planned(config, "v6e")
    low_rank = found[1, "training"]
    assert low_rank.chosen == min(low_rank.times, key=lambda name: low_rank.times[name].total)
    assert set(low_rank.times) == {"synthesised", "factored-side-by-side", "factored-grouped"}
    base = 1e6 * 2 * SIZE / CHIPS["v6e"].bandwidth
    # Every way reads the base once on a TPU, and one that makes kernels multiplies twice as many rows with it.
    deltas = 1e6 * 2 * E * 16 * 3 * (D + F) / CHIPS["v6e"].bandwidth
    assert low_rank.times["synthesised"].bytes == pytest.approx(base + deltas)
    assert low_rank.times["factored-side-by-side"].bytes == pytest.approx(base + deltas)
    assert low_rank.times["factored-side-by-side"].products < 0.6 * low_rank.times["synthesised"].products
    # Where bytes are dearer beside products, many rows are needed to be bound by products.
    few = planned(config, "v6e", tokens=512)[1, "training"].times["factored-side-by-side"]
    on_cpu = planned(config, "cpu", tokens=512)[1, "training"].times["factored-side-by-side"]
    assert (few.bound, on_cpu.bound) == ("bytes", "products")


def test_a_frozen_base_in_nf4_has_no_synthesised_kernels():
    config = model(BankConfig(kind="low-rank", rank=4, train_base=False), nf4=True)
    assert "synthesised" not in planned(config, "v5e")[1, "training"].times


def test_equal_layers_are_one_kind():
    bank = BankConfig(kind="low-rank", rank=16)
    assert {layer.layers for layer in planned_strategies(model(bank, bank), "v5e").layers} == {(1, 2)}


def test_experts_without_a_choice_are_named():
    adapters = BankConfig(kind="adapter", adapter=AdapterConfig(rank=8, activation="gelu"))
    found = planned_strategies(model(adapters), "v5e")
    assert (found.layers, found.left_out) == ((), {"adapter experts": 1})


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_to_json(model(BankConfig(kind="low-rank", rank=16), BankConfig()))))
    return file


def test_the_command_prints_what_the_verb_returns(config_file, capsys):
    words = ["plan", str(config_file), "--platform", "v5p", "--tokens", "4096"]
    assert cli.main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["strategies"]
    verb = moe_jax.plan(config_file, platform="v5p", tokens=4096).strategies
    assert said == json.loads(json.dumps(dataclasses.asdict(verb)))
    assert said["bytes_per_second"] == 2.765e12 and said["source"].startswith("https://docs.cloud.google.com/tpu")
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "on v5p: 459 TFLOP/s in bfloat16, 2765 GB/s, 166 operations per byte" in printed
    for layer in verb.layers:
        assert f"{layer.experts}, top-2, {layer.use}, {layer.tokens:,} tokens on a device: {layer.chosen} (" in printed
        assert f"* {layer.chosen}" in printed and f"{layer.times[layer.chosen].total:,.1f}" in printed


def test_a_dense_model_has_nothing_to_choose(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_to_json(dense_model(16, 24, 2))))
    assert cli.main(["plan", str(file), "--platform", "cpu"]) == 0
    assert "no layer has experts: nothing to choose" in capsys.readouterr().out


def test_tokens_need_a_platform(config_file):
    with pytest.raises(InputError, match="tokens: only with platform"):
        moe_jax.plan(config_file, tokens=64)
    with pytest.raises(InputError, match="unknown platform 'v6'"):
        moe_jax.plan(config_file, platform="v6")
