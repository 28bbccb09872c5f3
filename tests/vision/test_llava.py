"""LLaVA against Transformers on the same weights: logits, loss, gradients and continuations, all in float32."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.conversion import HuggingFaceDirectory
from moe_jax.distributed.sharding import make_mesh
from moe_jax.images.image_config import ImageProcessing
from moe_jax.images.processing import write_processing
from moe_jax.model_io.loading import load_model
from moe_jax.nn.projector import tokens_per_picture
from tests.support.tiers import long, one_in
from tests.support.vision_models import LLAVAS, batch_of, made_llava

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.seeing_references import check_loss_and_gradients, their_pixels  # noqa: E402

COUNTS, LENGTH = (0, 1, 3), 24
# Checkpoints that say how pictures are processed, in the file of older and of newer releases of Transformers.
UNCUT = {"qwen2": "processor_config.json", "gemma2": "preprocessor_config.json"}
SEEING = ("projector/0/kernel", "projector/2/kernel", "tower/patches/projection/kernel", "tower/layers/0/mlp/up/kernel")
FEW = one_in(len(LLAVAS))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """name -> the model of Transformers, its checkpoint, and a batch for both."""
    found = {}

    def make(name: str):
        if name not in found:
            theirs = made_llava(name)
            folder = tmp_path_factory.mktemp(name)
            theirs.save_pretrained(folder)
            if (file := UNCUT.get(name)) is not None:
                keys = write_processing(ImageProcessing(size=(8, 8), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)))
                inside = file == "processor_config.json"
                (folder / file).write_text(json.dumps({"image_processor": keys} if inside else keys))
            source = HuggingFaceDirectory(folder)
            vision = source.config.vision
            assert vision is not None
            count = tokens_per_picture(vision, source.config.d_model)
            seen = batch_of(COUNTS, count, LENGTH, vision.processing.size)
            found.clear()
            found[name] = theirs, source, seen
        return found[name]

    return make


@one_in(12)  # a dense model and an MoE
@pytest.mark.parametrize("name", LLAVAS)
def test_logits(both, name, strict_numerics):
    theirs, source, seen = both(name)
    with torch.no_grad():
        pixels = their_pixels(source, seen.pictures)
        expected = theirs(torch.tensor(seen.ids), pixel_values=pixels).logits.numpy()
        without = theirs(torch.tensor(seen.ids[:1])).logits.numpy()
    assert np.std(expected) > 0.1
    model = load_model(source)
    run = nnx.jit(lambda model, ids, pixels, slots: model(ids, pixels=pixels, slots=slots).logits)
    got = np.asarray(run(model, jnp.asarray(seen.ids), jnp.asarray(seen.pixels), jnp.asarray(seen.slots)))
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert error <= 2e-5
    text = np.asarray(model(jnp.asarray(seen.ids[:1])).logits)
    assert np.abs(text - without).max() <= 2e-5 * np.abs(without).max()
    assert np.abs(text - got[:1]).max() <= 2e-5 * np.abs(without).max()


@FEW
@pytest.mark.parametrize("name", LLAVAS)
def test_loss_and_all_gradients(both, name, tmp_path, strict_numerics):
    _, source, seen = both(name)
    paths = {f"vision/{leaf}" for leaf in SEEING}
    check_loss_and_gradients(made_llava(name), source, seen, tmp_path, lambda path: path in paths)


@FEW
@pytest.mark.parametrize("name", LLAVAS)
def test_32_greedy_tokens(both, name):
    theirs, source, seen = both(name)
    options = dict(max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        ids, mask = torch.tensor(seen.ids), torch.ones(seen.ids.shape, dtype=torch.long)
        pixels = their_pixels(source, seen.pictures)
        expected = theirs.generate(ids, pixel_values=pixels, attention_mask=mask, **options)[:, LENGTH:].numpy()
    rows = [[int(token) for token in row] for row in seen.ids]
    made = moe_jax.generate(moe_jax.load(source.path), rows, max_new_tokens=32, image=seen.pictures)
    # What a model that was drawn at random says may hold placeholders, of which it stops at none.
    assert [one.ids for one in made] == expected.tolist()


@long
@pytest.mark.parametrize(
    "axes", [{"data": 4, "tensor": 2}, {"fsdp": 4, "tensor": 2}, {"data": 2, "sequence": 4}], ids=str
)
def test_a_mesh_gives_the_tokens_of_one_device(both, axes):
    _, source, seen = both("llama")
    rows = [[int(token) for token in row] for row in [*seen.ids, *seen.ids[:1]]]
    options = {"max_new_tokens": 8, "image": seen.pictures}
    one = moe_jax.generate(moe_jax.load(source.path), rows, **options)
    over = moe_jax.generate(moe_jax.load(source.path, mesh=make_mesh(axes)), rows, **options)
    assert [row.ids for row in over] == [row.ids for row in one]
