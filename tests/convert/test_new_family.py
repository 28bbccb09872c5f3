"""A further family is one small file. One, sketched here against the names of its true checkpoint."""

import itertools
import json
import pathlib

import pytest

from moe_jax.convert.families import FAMILIES
from moe_jax.convert.families._shared import (
    ATTENTION,
    EMBEDDING,
    GATED_FFN,
    HEAD,
    Family,
    read_attention,
    read_decoder,
    read_gated_ffn,
    repeat_layers,
)
from moe_jax.convert.foreign_config import ForeignConfig
from moe_jax.models import ModelConfig
from tests.convert.conftest import expected_tensors


def read_stablelm(config: ForeignConfig) -> ModelConfig:
    attention = read_attention(config, biases="qkv" if config.flag("use_qkv_bias") else "")
    return read_decoder(
        config, "stablelm", repeat_layers(config, attention, read_gated_ffn(config)), norm="layer", eps="layer_norm_eps"
    )


NEW = {
    "stabilityai__stablelm-2-1_6b": Family(
        name="stablelm",
        architecture="StableLmForCausalLM",
        defaults={"hidden_act": "silu"},
        read=read_stablelm,
        write=lambda config: {},
        table=(*EMBEDDING, *ATTENTION, *GATED_FFN, *HEAD),
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
