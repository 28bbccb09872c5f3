"""Experts in MXFP4: the numbers and the shapes of Transformers."""

import numpy as np
import pytest
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.compressed_weights import assert_decoded, folded, read_whole

NAME = "model.layers.0.mlp.experts.gate_up_proj"
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]}


def drawn(experts, columns, groups, low=96, high=140):
    generator = torch.Generator().manual_seed(0)
    return {
        f"{NAME}_blocks": torch.randint(256, (experts, columns, groups, 16), generator=generator).to(torch.uint8),
        f"{NAME}_scales": torch.randint(low, high, (experts, columns, groups), generator=generator).to(torch.uint8),
    }


@pytest.mark.parametrize("shape", [(3, 20, 2), (1, 5, 1), (2, 48, 3)])
def test_experts_are_those_of_transformers(shape, tmp_path):
    stored = drawn(*shape)
    expected = convert_moe_packed_tensors(*stored.values(), dtype=torch.float32)
    others = {f"{NAME}_bias": torch.ones(shape[0], shape[1]), "model.norm.weight": torch.ones(8)}
    assert_decoded(tmp_path, stored | others, CONFIG, {NAME: expected} | others)


def test_the_least_and_the_largest_scales(tmp_path):
    """Numbers that float32 has only without leading ones, and those of the largest scale that do not overflow."""
    stored = drawn(1, 4, 2)
    stored[f"{NAME}_scales"][:] = torch.tensor([[[0, 254]]])
    stored[f"{NAME}_blocks"] &= 0x33
    assert_decoded(tmp_path, stored, CONFIG, {NAME: convert_moe_packed_tensors(*stored.values(), dtype=torch.float32)})


def test_experts_have_the_shape_that_they_have_without_codes(tmp_path):
    small = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=32, num_local_experts=4, num_hidden_layers=1, vocab_size=32,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(small)
    [entry] = folded(tmp_path, drawn(4, 64, 2), CONFIG).values()
    assert entry.shape == tuple(model.state_dict()[NAME].shape)
    assert np.isfinite(read_whole(entry)).all()
