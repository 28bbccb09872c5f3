"""Language models inside of models of text and more, against Transformers on a text: the whole is read, they leave."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file, save_file

import moe_jax
from moe_jax.conversion import HuggingFaceDirectory, read_hf_config
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import load_model
from tests.families.cases import SMALL, llama4_text, mistral4
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
_PIXTRAL = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
_LLAMA4 = {**SMALL, **llama4_text.CASES["llama4_text-no-norm-every-second"]}
_LLAMA4_SIGHT = dict(
    hidden_size=16, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)

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
    "mistral3": (
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        dict(
            text_config={**SMALL, **mistral4.CASES["mistral4"], "model_type": "mistral4"},
            vision_config=_PIXTRAL,
            tie_word_embeddings=False,
        ),
        "mistral4",
    ),
    "llama4": (
        "Llama4Config",
        "Llama4ForConditionalGeneration",
        dict(text_config=_LLAMA4, vision_config=_LLAMA4_SIGHT),
        "llama4_text",
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


def rewritten(folder, name, change):
    """The folder with other tensors, and with the config of a model that has this one as its part, if that is named."""
    file = folder / "model.safetensors"
    tensors = {key: value for old in load_file(file).items() for key, value in change(*old)}
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    if name != config["model_type"]:
        (folder / "config.json").write_text(json.dumps({"model_type": name, "thinker_config": config}))


def as_kernels(name, value):
    """The published layout of fused experts, which Transformers does not save a new model in."""
    return [(name, value.transpose(1, 2).contiguous() if ".experts." in name else value)]


def of_thinker(name, value):
    return [(f"thinker.{name}", value), ("talker.model.norm.weight", torch.ones(4))]


AS_PUBLISHED = {"qwen3_vl_moe": ("qwen3_vl_moe", as_kernels), "qwen3_omni_moe_thinker": ("qwen3_omni_moe", of_thinker)}


@one_in(len(WHOLES))
@pytest.mark.parametrize("name", WHOLES)
def test_a_text_gets_the_logits_of_the_whole_and_the_part_leaves_as_its_family(name, tmp_path):
    whole, family = whole_model(name), WHOLES[name][-1]
    whole.save_pretrained(tmp_path / "whole")
    source = HuggingFaceDirectory(tmp_path / "whole")
    assert source.config.family == family and source.config.vision is None
    assert any("alone is read" in why for why in source.weights.ignored.values())
    with torch.no_grad():
        # Llama 4 as a whole has no forward pass without a picture in Transformers 5.24.
        alone = whole.language_model if name == "llama4" else whole
        expected = alone(torch.tensor(TOKENS), use_cache=False).logits.numpy()
    assert np.std(expected) > 0.1
    model = load_model(source)
    assert close(nnx.jit(lambda model, tokens: model(tokens).logits)(model, jnp.asarray(TOKENS, jnp.int32)), expected)
    leaves = {path: source.read(path) for path in source.specs()}
    if name in AS_PUBLISHED:
        rewritten(tmp_path / "whole", *AS_PUBLISHED[name])
        source = HuggingFaceDirectory(tmp_path / "whole")
        assert all(np.array_equal(source.read(path), leaf) for path, leaf in leaves.items())
    moe_jax.convert(tmp_path / "whole", tmp_path / "ours")
    moe_jax.export(tmp_path / "ours", tmp_path / "part")
    (architecture,) = json.loads((tmp_path / "part" / "config.json").read_text())["architectures"]
    part = getattr(transformers, architecture).from_pretrained(tmp_path / "part", attn_implementation="eager")
    with torch.no_grad():
        assert close(part(torch.tensor(TOKENS), use_cache=False).logits.numpy(), expected)
    again = HuggingFaceDirectory(tmp_path / "part")
    assert again.config == source.config
    assert all(np.array_equal(again.read(path), leaf) for path, leaf in leaves.items())


def test_a_part_that_is_not_there_or_of_another_family_is_named():
    with pytest.raises(InputError, match="text_config"):
        read_hf_config({"model_type": "qwen3_vl_moe"})
    with pytest.raises(InputError, match="expected one of"):
        read_hf_config({"model_type": "qwen3_vl_moe", "text_config": {"model_type": "llama"}})
    with pytest.raises(InputError, match="ignore-keys thinker_config.text_config.new_key"):
        keys = {key: value for key, value in _QWEN.items() if value is not None}
        read_hf_config({"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": {**keys, "new_key": 1}}})
