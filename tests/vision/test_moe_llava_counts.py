"""Parameters of MoE-LLaVA and Med-MoE at true size, counted from shapes alone."""

import dataclasses
import math

import pytest

import moe_jax
from moe_jax.api.open_source import read_config
from moe_jax.conversion.hf_config import read_hf_config
from moe_jax.model_io.loading import leaf_specs
from moe_jax.planning.model_costs import make_plan
from moe_jax.upcycling.dense_to_moe import upcycled_config
from tests.support.tiers import one_in
from tests.vision.moe_llava_checkpoints import BACKBONES, CLIP_LARGE, KINDS, config_of

DELTAS = ("full", "sparse:0.9999", "low-rank:1")
# File: what the experts add by `DELTAS`, then the biases of routers and the universal FFNs that Med-MoE adds.
ADDED = {
    "derived/stabilityai__stablelm-2-1_6b": (1_245_806_592, 264_336, 1_204_224, 48, 415_236_096),
    "as_found/Qwen__Qwen-1_8B": (1_217_495_040, 260_592, 1_185_792, 48, None),
    "derived/microsoft__phi-2": (2_517_360_640, 1_113_728, 2_416_640, 64, 839_065_600),
}


@one_in(3)
@pytest.mark.parametrize("file", ADDED)
def test_what_experts_add(file, data_dir):
    *added, biases, universal = ADDED[file]
    dense = read_config(data_dir / "configs" / f"{file}.json")
    before = make_plan(dense).total_params
    for delta, expected in zip(DELTAS, added, strict=True):
        spec = moe_jax.UpcycleSpec(experts=4, top_k=2, every=2, delta=delta)
        count = make_plan(upcycled_config(dense, spec)).total_params
        assert count - before == expected, delta
        with_bias = upcycled_config(dense, dataclasses.replace(spec, router_bias=True))
        assert make_plan(with_bias).total_params - count == biases
        if universal is not None:
            med = upcycled_config(dense, dataclasses.replace(spec, router_bias=True, universal="med", top_k=1))
            assert make_plan(med).total_params - count == biases + universal


@pytest.mark.parametrize(("width", "expected"), [(2048, 6_295_552), (2560, 9_180_160)])
def test_the_tower_and_the_projector(width, expected):
    text = BACKBONES["phi"] | {"hidden_size": width, "num_attention_heads": 32}
    leaves = leaf_specs(read_hf_config(config_of(KINDS["phi-moe"], text, CLIP_LARGE)))
    counts = {"tower": 0, "projector": 0}
    for path, leaf in leaves.items():
        if path.startswith("vision/"):
            counts[path.split("/")[1]] += math.prod(leaf.shape)
    assert counts == {"tower": 303_507_456, "projector": expected}
