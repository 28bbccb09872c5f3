"""Language models inside of models of text and more, against Transformers on a text: the whole is read, they leave."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import moe_jax
from moe_jax.conversion import HuggingFaceDirectory, read_hf_config
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import load_model
from tests.families.cases import SMALL
from tests.support.tiers import one_in

TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, 24))
_TEXT = {**SMALL, "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_QWEN = {**_TEXT, "rope_parameters": _ROPE}
_DENSE = {key: value for key, value in _QWEN.items() if "expert" not in key and not key.startswith("moe")}
_SIGHT = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    out_hidden_size=32,
    num_position_embeddings=16,
    deepstack_visual_indexes=[0],
    patch_size=4,
)
_HEARING = dict(
    num_mel_bins=8, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, d_model=16, output_dim=32
)
_THINKER = dict(text_config=_QWEN, vision_config=_SIGHT, audio_config=_HEARING)

# name -> the class of Transformers' config and of its model, keys, the family that is read, and the places of its parts
WHOLES = {
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        dict(text_config=_QWEN, vision_config=_SIGHT),
        "qwen3_moe",
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        dict(text_config=_DENSE, vision_config=_SIGHT, tie_word_embeddings=True),
        "qwen3",
    ),
    "qwen3_omni_moe_thinker": (
        "Qwen3OmniMoeThinkerConfig",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        _THINKER,
        "qwen3_moe",
    ),
}


def whole_model(name):
    config, model, keys, _ = WHOLES[name]
    whole = getattr(transformers, model)._from_config(
        getattr(transformers, config)(**keys), attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, value in whole.state_dict().items():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.1 * noise if "norm" in key else 0.15 * noise)
    return whole.float().eval()


def close(got, expected) -> bool:
    return bool(np.abs(np.asarray(got) - expected).max() <= 2e-5 * np.abs(expected).max())


@one_in(len(WHOLES))
@pytest.mark.parametrize("name", WHOLES)
def test_a_text_gets_the_logits_of_the_whole_and_the_part_leaves_as_its_family(name, tmp_path):
    whole, family = whole_model(name), WHOLES[name][-1]
    whole.save_pretrained(tmp_path / "whole")
    source = HuggingFaceDirectory(tmp_path / "whole")
    assert source.config.family == family and source.config.vision is None
    assert any("alone is read" in why for why in source.weights.ignored.values())
    with torch.no_grad():
        expected = whole(torch.tensor(TOKENS), use_cache=False).logits.numpy()
    assert np.std(expected) > 0.1
    model = load_model(source)
    assert close(nnx.jit(lambda model, tokens: model(tokens).logits)(model, jnp.asarray(TOKENS, jnp.int32)), expected)
    moe_jax.convert(tmp_path / "whole", tmp_path / "ours")
    moe_jax.export(tmp_path / "ours", tmp_path / "part")
    part = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "part", attn_implementation="eager")
    with torch.no_grad():
        assert close(part(torch.tensor(TOKENS), use_cache=False).logits.numpy(), expected)
    again = HuggingFaceDirectory(tmp_path / "part")
    assert again.config == source.config
    assert all(np.array_equal(again.read(path), source.read(path)) for path in source.specs())
