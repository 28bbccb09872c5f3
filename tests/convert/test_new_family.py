"""A further family is one small file. Two, sketched here against the names of their true checkpoints."""

import itertools
import json
import pathlib

import pytest

from moe_jax.convert import read_hf_config, write_hf_config
from moe_jax.convert.families import FAMILIES
from moe_jax.convert.families._shared import (
    ATTENTION,
    EMBEDDING,
    GATED_FFN,
    HEAD,
    Family,
    gated_experts,
    read_attention,
    read_decoder,
    read_gated_ffn,
    repeat_layers,
    uniform_moe,
    write_activation,
    write_decoder,
)
from moe_jax.convert.foreign_config import ForeignConfig
from moe_jax.convert.table import linear
from moe_jax.models import ModelConfig, MoEConfig
from tests.convert.conftest import expected_tensors


def read_stablelm(config: ForeignConfig) -> ModelConfig:
    attention = read_attention(config, biases="qkv" if config.flag("use_qkv_bias") else "")
    return read_decoder(
        config, "stablelm", repeat_layers(config, attention, read_gated_ffn(config)), norm="layer", eps="layer_norm_eps"
    )


def read_qwen3_moe(config: ForeignConfig) -> ModelConfig:
    moe = MoEConfig(
        expert=read_gated_ffn(config, dim="moe_intermediate_size"),
        num_experts=config.integer("num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        gate="topk_softmax" if config.flag("norm_topk_prob") else "softmax_topk",
    )
    return read_decoder(config, "qwen3_moe", repeat_layers(config, read_attention(config, qk_norm="head"), moe))


def write_qwen3_moe(config: ModelConfig) -> dict:
    moe = uniform_moe(config)
    return {
        **write_decoder(config),
        "moe_intermediate_size": moe.expert.dim,
        "hidden_act": write_activation(moe.expert),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.gate == "topk_softmax",
    }


NEW = {
    "stabilityai__stablelm-2-1_6b": Family(
        name="stablelm",
        architecture="StableLmForCausalLM",
        defaults={"hidden_act": "silu"},
        read=read_stablelm,
        write=lambda config: {},
        table=(*EMBEDDING, *ATTENTION, *GATED_FFN, *HEAD),
    ),
    "Qwen__Qwen3-30B-A3B": Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        defaults={},
        read=read_qwen3_moe,
        write=write_qwen3_moe,
        table=(
            *EMBEDDING,
            *ATTENTION,
            *linear("model.layers.{i}.mlp.gate", "layers/{i}/mlp/router"),
            *gated_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
            *HEAD,
        ),
    ),
}


@pytest.mark.parametrize("name", NEW)
def test_names_and_shapes(data_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setitem(FAMILIES, NEW[name].name, NEW[name])
    config = json.loads((data_dir / "configs" / "derived" / f"{name}.json").read_text())
    template = json.loads((data_dir / "configs" / "weight_names_derived" / f"{name}.json").read_text())
    expected = {
        tensor["name"].format(**dict(zip(tensor["ranges"], numbers, strict=True))): tuple(tensor["shape"])
        for tensor in template["tensors"]
        for numbers in itertools.product(*(range(*bounds) for bounds in tensor["ranges"].values()))
    }
    assert expected_tensors(config) == expected


def test_a_config_goes_both_ways(data_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    name = "Qwen__Qwen3-30B-A3B"
    monkeypatch.setitem(FAMILIES, NEW[name].name, NEW[name])
    config = json.loads((data_dir / "configs" / "derived" / f"{name}.json").read_text())
    written = write_hf_config(read_hf_config(config))
    assert {key: written[key] for key in config} == config
