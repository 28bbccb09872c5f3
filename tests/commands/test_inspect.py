import json

import jax
import numpy as np
import pytest

import moe_jax
from moe_jax.commands import cli
from moe_jax.commands.inspect import collapse
from moe_jax.core.formatting import show_bytes
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_dir import ModelDirectoryWriter
from moe_jax.models import AttentionConfig, BankConfig, FFNConfig, LayerConfig, ModelConfig, MoEConfig

ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
EXPERT = FFNConfig(dim=48)
LOW_RANK = MoEConfig(expert=EXPERT, num_experts=4, top_k=2, bank=BankConfig(kind="low-rank", rank=2))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Six layers, every second with experts."""
    layers = (LayerConfig(attention=ATTENTION, mlp=EXPERT), LayerConfig(attention=ATTENTION, mlp=LOW_RANK)) * 3
    config = ModelConfig(family="llama", vocab_size=64, d_model=32, max_positions=64, layers=layers)
    path = tmp_path_factory.mktemp("inspect") / "model"
    source = {"path": "[hf]", "fingerprint": "0123456789abcdef"}
    lineage = [
        {"command": "convert", "options": {"dtype": None}, "sources": [source]},
        {"command": "upcycle", "options": {"experts": 4}, "sources": [], "measured": {"step0_difference": 0.5}},
    ]
    with ModelDirectoryWriter(path, config, tokenizer_files=[], lineage=lineage) as writer:
        writer.write({name: np.zeros(spec.shape, spec.dtype) for name, spec in leaf_specs(config).items()})
    return path


def test_equal_layers_are_one_row(model, capsys):
    assert cli.main(["inspect", str(model)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["layers/{0..5}/attention/q/kernel", "[32,", "32]", "float32", "6", "24.6", "kB"] in lines
    assert ["layers/{0..4..2}/mlp/up/kernel", "[32,", "48]", "float32", "3", "18.4", "kB"] in lines
    assert ["layers/{1..5..2}/mlp/experts/delta/up/a", "[4,", "32,", "2]", "float32", "3", "3.1", "kB"] in lines
    assert ["embed/embedding", "[64,", "32]", "float32", "8.2", "kB"] in lines


def test_experts_and_lineage_are_told(model, capsys):
    assert cli.main(["inspect", str(model)]) == 0
    out = capsys.readouterr().out
    experts = 3 * 32 * 48 + 4 * 3 * 2 * (32 + 48)
    assert "experts of layers/{1..5..2}: 4 experts, top 2, gate topk_softmax; kind low-rank, rank 2" in out
    assert f"{experts:,} parameters, {show_bytes(4 * experts)} per layer" in out
    assert "convert dtype=None\n    from [hf] (0123456789ab)" in out
    assert "upcycle experts=4\n    measured: step0_difference 0.5" in out


def test_json_is_all_there_is_on_stdout(model, capsys):
    assert cli.main(["inspect", str(model), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["parameters"] * 4 == described["bytes"] == sum(leaf["bytes"] for leaf in described["leaves"])
    assert {"path": "final_norm/scale", "shape": [32], "dtype": "float32", "bytes": 128} in described["leaves"]
    assert [entry["layer"] for entry in described["experts"]] == [1, 3, 5]
    assert described["experts"][0]["bank"] == {"kind": "low-rank", "rank": 2, "train_base": True}
    assert [entry["command"] for entry in described["lineage"]] == ["convert", "upcycle"]
    assert described["config"]["format"] == "moe_jax.model"


def test_a_hugging_face_directory_can_be_inspected(data_dir, capsys):
    assert cli.main(["inspect", str(data_dir / "weights" / "stories260K" / "hf"), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["parameters"] == 260032 and described["lineage"] == [] and described["experts"] == []


def test_layers_that_differ_are_kept_apart():
    def spec(*shape):
        return jax.ShapeDtypeStruct(shape, np.float32)

    rows = collapse({"a": spec(1), "layers/0/b": spec(2), "layers/1/b": spec(3), "layers/2/b": spec(2)})
    assert {name: (row.shape, count) for name, (row, count) in rows.items()} == {
        "a": ((1,), 1),
        "layers/{0,2}/b": ((2,), 2),
        "layers/1/b": ((3,), 1),
    }


def test_weights_in_codes_are_counted_beside_the_parameters(tmp_path, capsys):
    moe_jax.compress(moe_jax.tiny_model(experts=4), tmp_path / "small", method="quantize", bits=4)
    assert cli.main(["inspect", str(tmp_path / "small")]) == 0
    assert " parameters and 12,288 weights in codes, " in capsys.readouterr().out
