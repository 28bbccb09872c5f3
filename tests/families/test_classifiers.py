"""Models that score classes against Transformers: logits at the last token, and the checkpoint back, bit for bit."""

import copy
import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from rich.console import Console

from moe_jax.conversion import HuggingFaceDirectory, convert, export  # noqa: E402
from moe_jax.conversion.hf_config import class_names, read_hf_config, write_hf_config  # noqa: E402
from moe_jax.core.errors import InputError  # noqa: E402
from moe_jax.evaluation.classification import class_scores  # noqa: E402
from moe_jax.evaluation.held_out import score_rows  # noqa: E402
from moe_jax.model_io.loading import load_model  # noqa: E402
from moe_jax.model_io.model_dir import ModelDirectory  # noqa: E402
from tests.support.tiers import one_in  # noqa: E402

EOS, PAD = 1, 0
LLAMA = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=PAD, eos_token_id=EOS,
)  # fmt: skip
T5 = dict(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=PAD)
CASES = {
    "Llama": dict(LLAMA, num_labels=3),
    "Qwen2": dict(LLAMA, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1}, tie_word_embeddings=True),
    "Mixtral": dict(LLAMA, num_labels=5, num_local_experts=4),
    "Phi": dict(LLAMA, num_labels=1),
    "T5": dict(T5, num_labels=3, feed_forward_proj="gated-gelu"),
}
random = np.random.default_rng(0)
TEXTS = [np.append(random.integers(2, 96, length), EOS) for length in (30, 7, 18)]


@pytest.fixture(scope="module", params=CASES)
def model(request, tmp_path_factory):
    """A model of Transformers whose every parameter is random and large enough to matter, and its checkpoint."""
    name, folder = request.param, tmp_path_factory.mktemp("classifier")
    config = getattr(transformers, f"{name}Config")(**CASES[name])
    made = getattr(transformers, f"{name}ForSequenceClassification")._from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, value in made.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.1 * noise if "norm" in key and not key.endswith("bias") else 0.3 * noise)
    made.float().save_pretrained(folder)
    return made.eval(), HuggingFaceDirectory(folder)


@one_in(4)  # a decoder, and an encoder and a decoder
def test_logits_equal_transformers(model):
    reference, source = model
    if not source.config.moe_layers:
        # The error that is left is ours. PyTorch's grouped product has no float64.
        reference = copy.deepcopy(reference).double()
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            expected.append(reference(input_ids=torch.tensor(text)[None]).logits[0].numpy())
    expected = np.array(expected)
    assert np.std(expected) > 0.1  # otherwise equality would say little
    decoder = load_model(source)
    assert source.config.num_classes == expected.shape[1]
    graphdef, state = nnx.split(decoder)
    rows = partial(score_rows, graphdef=graphdef, states=(state,), batch_size=2)
    found = class_scores(rows, source.config, TEXTS)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max(), rtol=0)


def test_the_checkpoint_comes_back_bit_for_bit(model, tmp_path):
    reference, source = model
    quiet = Console(quiet=True)
    convert(source.path, tmp_path / "ours", console=quiet)
    export(ModelDirectory(tmp_path / "ours"), tmp_path / "back", console=quiet)
    back = HuggingFaceDirectory(tmp_path / "back")
    assert back.config == source.config and class_names(back.config) == class_names(source.config)
    for path in source.specs():
        np.testing.assert_array_equal(source.read(path), back.read(path))
    assert back.checkpoint.tensors.keys() == source.checkpoint.tensors.keys()
    again, report = type(reference).from_pretrained(
        tmp_path / "back", attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert again.config.id2label == reference.config.id2label
    parameters, found = reference.state_dict(), again.state_dict()
    assert parameters.keys() == found.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, found[name]), name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"id2label": ["a", "b"]}, r"'id2label' is \['a', 'b'\], expected .* of 0, 1"),
        ({"id2label": {"0": "a", "2": "b"}}, "name for each"),
        ({"num_labels": 0}, "'num_labels' is 0, expected .* from 1 on"),
    ],
)
def test_classes_that_cannot_be_counted_are_named(keys, message):
    config = LLAMA | {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    with pytest.raises(InputError, match=message):
        read_hf_config(config | keys)


def test_a_format_without_classes_refuses_them():
    config = read_hf_config({"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], **LLAMA})
    with pytest.raises(InputError, match="num_classes is 3"):
        write_hf_config(dataclasses.replace(config, num_classes=3))
