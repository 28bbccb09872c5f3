"""InternVL and SmolVLM against Transformers, pictures given as pixels: states, logits, gradients and continuations."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.conversion import HuggingFaceDirectory
from moe_jax.model_io.loading import load_model
from moe_jax.nn.projector import tokens_per_picture
from tests.support.tiers import long, one_in
from tests.support.vision_models import TILED, batch_of, random_tiled

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.seeing_references import check_loss_and_gradients, their_pixels  # noqa: E402

COUNTS, LENGTH = (0, 1, 3), 24


def made_tiled(name: str):
    kind, text, more = TILED[name]
    return random_tiled(kind, text, **more)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """name -> the model of Transformers, its checkpoint, and a batch for both."""
    found = {}

    def make(name: str):
        if name not in found:
            theirs = made_tiled(name)
            folder = tmp_path_factory.mktemp(name)
            theirs.save_pretrained(folder)
            source = HuggingFaceDirectory(folder)
            vision = source.config.vision
            assert vision is not None
            count = tokens_per_picture(vision, source.config.d_model)
            found.clear()
            found[name] = theirs, source, batch_of(COUNTS, count, LENGTH, vision.processing.size)
        return found[name]

    return make


@one_in(len(TILED))
@pytest.mark.parametrize("name", TILED)
def test_what_the_tower_and_the_projector_make(both, name):
    theirs, source, seen = both(name)
    with torch.no_grad():
        found = theirs.model.get_image_features(their_pixels(source, seen.pictures), return_dict=True)
    expected = found.pooler_output
    expected = torch.cat(list(expected)).numpy() if isinstance(expected, list | tuple) else expected.numpy()
    run = nnx.jit(lambda model, pixels: (model.see(pixels), model.vision.features(pixels)))
    ours, states = map(np.asarray, run(load_model(source), jnp.asarray(np.stack(seen.pictures)[:, None])))
    np.testing.assert_allclose(ours.ravel(), expected.ravel(), atol=2e-5 * np.abs(expected).max(), rtol=0)
    vision = source.config.vision
    assert vision is not None and vision.projector[0].startswith("pixel_shuffle:")
    if vision.family == "internvl" and vision.features == (-1,):
        last = found.last_hidden_state.numpy()[:, 1:]
        np.testing.assert_allclose(states[:, 0], last, atol=2e-5 * np.abs(last).max(), rtol=0)


@one_in(len(TILED), first=1)
@pytest.mark.parametrize("name", TILED)
def test_logits(both, name, strict_numerics):
    theirs, source, seen = both(name)
    with torch.no_grad():
        expected = theirs(torch.tensor(seen.ids), pixel_values=their_pixels(source, seen.pictures)).logits.numpy()
        without = theirs(torch.tensor(seen.ids[:1])).logits.numpy()
    assert np.std(expected) > 0.1
    model = load_model(source)
    run = nnx.jit(lambda model, ids, pixels, slots: model(ids, pixels=pixels, slots=slots).logits)
    got = np.asarray(run(model, jnp.asarray(seen.ids), jnp.asarray(seen.pixels), jnp.asarray(seen.slots)))
    assert np.abs(got - expected).max() <= 2e-5 * np.abs(expected).max()
    assert np.abs(got[:1] - without).max() <= 2e-5 * np.abs(without).max()


@long
@pytest.mark.parametrize("name", TILED)
def test_loss_and_all_gradients(both, name, tmp_path, strict_numerics):
    _, source, seen = both(name)

    def sees(path: str) -> bool:
        return path.startswith("vision/projector/") or "tower/layers/0/mlp" in path

    check_loss_and_gradients(made_tiled(name), source, seen, tmp_path, sees)


@long
@pytest.mark.parametrize("name", TILED)
def test_16_greedy_tokens(both, name):
    theirs, source, seen = both(name)
    options = dict(max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        ids, mask = torch.tensor(seen.ids), torch.ones(seen.ids.shape, dtype=torch.long)
        pixels = their_pixels(source, seen.pictures)
        expected = theirs.generate(ids, pixel_values=pixels, attention_mask=mask, **options)[:, LENGTH:].numpy()
    rows = [[int(token) for token in row] for row in seen.ids]
    made = moe_jax.generate(moe_jax.load(source.path), rows, max_new_tokens=16, image=seen.pictures)
    assert [one.ids for one in made] == expected.tolist()
