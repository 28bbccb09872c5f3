"""A real pretrained Llama: its published greedy story, and Transformers' logits."""

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from moe_jax.convert import HuggingFaceDirectory
from moe_jax.generation import generate
from moe_jax.loading import load_model

BOS = 1


@pytest.fixture(scope="module")
def folder(data_dir):
    return data_dir / "weights" / "stories260K"


@pytest.fixture(scope="module")
def model(folder):
    return load_model(HuggingFaceDirectory(folder / "hf"))


def test_greedy_text_is_the_published_one(folder, model):
    reference = (folder / "greedy_reference_from_upstream_doc.txt").read_text()
    tokens = generate(model, [[BOS]], max_new_tokens=256, eos_ids=[BOS])[0]
    text = tokenizers.Tokenizer.from_file(str(folder / "hf" / "tokenizer.json")).decode(tokens)
    assert text == reference.removesuffix("\n")  # the file ends its text with a line end


def test_logits_equal_transformers(folder, model, data_dir):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "hf" / "tokenizer.json"))
    text = (data_dir / "text" / "tinystories" / "tinystories_sample_2MiB.txt").read_text()[:6000]
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False).ids[: 4 * 256]).reshape(4, 256)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(model(jnp.asarray(tokens, jnp.int32)).logits, expected, atol=1e-4, rtol=0)
