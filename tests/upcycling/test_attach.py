"""An image encoder put before a language model: what is kept, what is drawn, and what is refused."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from PIL import Image

import moe_jax
from moe_jax.commands import cli
from moe_jax.core.errors import InputError
from moe_jax.images.normalization import normalized
from moe_jax.images.picture_files import read_picture
from moe_jax.images.processing import pixels_of
from moe_jax.model_io.loading import load_tower
from moe_jax.nn import place_pictures
from tests.support.byte_tokenizer import BOS, byte_tokenizer
from tests.support.tiers import first, long, one_in

pytest.importorskip("torch")
pytest.importorskip("transformers")

from moe_jax.api.open_source import open_source  # noqa: E402
from tests.support.vision_models import Shape, random_tower  # noqa: E402

SHAPE = Shape(width=16, heads=2, hidden=32, layers=3, patch=4, side=4)
PICTURE = 60
STEPS = "pixel_shuffle:2,norm,linear,gelu,linear"


@pytest.fixture(scope="module", params=first(1, "dinov2", "clip"))
def tower(request, tmp_path_factory):
    """The directory of a small image encoder, with a class token and a norm after the last layer."""
    folder = tmp_path_factory.mktemp("tower") / request.param
    random_tower(request.param, SHAPE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tower") / "dinov2"
    random_tower("dinov2", SHAPE).save_pretrained(folder)
    return folder


def attached(tower, **options):
    return moe_jax.attach(moe_jax.tiny_model(), tower=tower, **{"size": 16, "projector": STEPS, **options})


def pictures(count, side=16):
    return np.random.default_rng(0).integers(0, 256, (1, count, side, side, 3), np.uint8)


def test_weights_are_kept_and_texts_get_the_same_logits(tower):
    model, blind, encoder = attached(tower), moe_jax.tiny_model(), open_source(tower, towers=True)
    tokens = jnp.arange(12)[None]
    np.testing.assert_array_equal(model(tokens).logits, blind(tokens).logits)
    kept = {path: blind.source.read(path) for path in blind.source.specs()}
    for path in encoder.specs():
        kept["vision/tower/" + path.replace("final_norm", "pooled_norm")] = encoder.read(path)
    for path in model.source.specs():
        if not path.startswith("vision/projector/"):
            np.testing.assert_array_equal(model.source.read(path), kept.pop(path), err_msg=path)
    assert not kept


@one_in(2)
@pytest.mark.parametrize("features", ["-2", "1,-2"])
def test_features_are_hidden_states_of_the_encoder(tower, features):
    model = attached(tower, features=features)
    pixels, encoder = pictures(2), load_tower(open_source(tower, towers=True))
    seen = encoder(normalized(jnp.asarray(pixels[0]), model.config.vision.processing), hidden_states=range(4))
    expected = jnp.concatenate([seen.hidden_states[int(one) % 4] for one in features.split(",")], axis=-1)[:, 1:]
    np.testing.assert_allclose(model.decoder.vision.features(jnp.asarray(pixels))[0], expected, atol=1e-5)
    assert model.report.tokens == 4 and model.decoder.see(jnp.asarray(pixels)).shape == (1, 8, 16)


def test_the_projector_is_drawn_by_the_seed_and_counted(tower):
    one, same, other = (attached(tower, seed=seed) for seed in (1, 1, 2))
    drawn = [path for path in one.source.specs() if path.startswith("vision/projector/") and path.endswith("/kernel")]
    assert len(drawn) == 2
    for path in drawn:
        kernel = one.source.read(path)
        np.testing.assert_array_equal(kernel, same.source.read(path))
        assert not np.array_equal(kernel, other.source.read(path)) and 0.01 < kernel.std() < 0.04
    width = 4 * SHAPE.width
    assert one.report.projector == 2 * width + (width * 16 + 16) + (16 * 16 + 16)
    assert one.lineage[-1]["measured"] == {"tokens": 4, "tower": one.report.tower, "projector": one.report.projector}


def test_pictures_are_padded_and_resized_or_as_the_encoder_says(dinov2, tmp_path):
    given = attached(dinov2).config.vision.processing
    assert (given.size, given.shortest, given.pad) == ((16, 16), None, True)
    usual = attached(dinov2, size=None, projector="linear").config.vision.processing
    assert usual.size == (16, 16) and usual.shortest == 16 * 256 // 224 and not usual.pad
    dinov2 = shutil.copytree(dinov2, tmp_path / "copy")
    said = {
        "size": {"shortest_edge": 20},
        "crop_size": 12,
        "do_center_crop": True,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.5, 0.5, 0.5],
    }
    (dinov2 / "preprocessor_config.json").write_text(json.dumps(said))
    read = attached(dinov2, size=None, projector="linear").config.vision.processing
    assert (read.size, read.shortest, read.mean) == ((12, 12), 20, (0.1, 0.2, 0.3))
    moe_jax.convert(dinov2, tmp_path / "converted")
    assert attached(tmp_path / "converted", size=None, projector="linear").config.vision.processing == read
    larger = attached(dinov2, size=24, projector="pool:3,linear").config.vision.processing
    assert (larger.size, larger.mean) == ((24, 24), (0.1, 0.2, 0.3))


def test_training_the_projector_leaves_all_else_as_it_is(dinov2):
    model = attached(dinov2)
    (row,) = place_pictures([[PICTURE, 5, 6, 7]], 1, placeholder=PICTURE, per_picture=4)
    tokens, slots = np.array([row.ids], np.int32), np.array([row.slots], np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "pixels": pictures(1), "slots": slots}
    recipe = {"optimizer": {"learning_rate": 1e-2}, "partition": {"train": ["vision/projector/.*"]}}
    losses = []
    trained = moe_jax.train(recipe, model, [batch] * 5, on_step=lambda record: losses.append(record["loss"]))
    changed = {path for path in model.source.specs()
               if not np.array_equal(model.source.read(path), trained.source.read(path))}  # fmt: skip
    assert losses[-1] < losses[0] and changed and all(path.startswith("vision/projector/") for path in changed)


@pytest.fixture
def texts(tmp_path):
    """A language model over bytes whose tokenizer knows `<image>` and `<other>`."""
    file = byte_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<image>", "<other>"])
    tokenizer.save(str(file))
    config = moe_jax.tiny_model().config
    decoder = moe_jax.Decoder(dataclasses.replace(config, vocab_size=260, bos_id=BOS), rngs=nnx.Rngs(0))
    return moe_jax.Model(decoder, tokenizer_files=[file])


def test_the_command_writes_a_model_that_takes_pictures(texts, dinov2, tmp_path, capsys):
    blind = moe_jax.save(texts, tmp_path / "blind")
    words = ["attach", blind, tmp_path / "seeing", "--tower", dinov2, "--size", 16, "--projector", STEPS]
    assert cli.main([str(word) for word in words]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "a picture becomes 4 tokens" in said and "{{ bos_token }}" in said
    model = moe_jax.load(tmp_path / "seeing")
    assert model.config.vision.placeholder == texts.tokenizer.id_of("<image>")
    Image.fromarray(pictures(1, 40)[0, 0]).save(tmp_path / "a.png")
    made = moe_jax.generate(model, "<image> is", image=[tmp_path / "a.png"], max_new_tokens=3)
    assert len(made.prompt_ids) == 4 + len(" is") and len(made.ids) <= 3
    options = {"tower": dinov2, "size": 16, "projector": STEPS}
    other = moe_jax.attach(texts, placeholder="<other>", **options)
    assert other.config.vision.placeholder == texts.tokenizer.id_of("<other>")
    with pytest.raises(InputError, match="no such token"):
        moe_jax.attach(texts, placeholder="<picture>", **options)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"projector": "linear,pixel_shuffle:2"}, "pixel_shuffle:2"),
        ({"projector": "pixel_shuffle:3,linear"}, "pixel_shuffle:3"),
        ({"projector": "liner"}, "liner"),
        ({"projector": ""}, "projector"),
        ({"projector": "pixel_shuffle:2"}, "entries"),
        ({"features": "9"}, "features"),
        ({"features": "last"}, "features"),
        ({"features": ()}, "features"),
        ({"size": 0}, "size 0"),
        ({"size": 5000}, "size 5000"),
        ({"size": 3}, "0 x 0 patches"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_options_that_do_not_fit_are_refused(dinov2, options, key):
    with pytest.raises(InputError, match=key):
        attached(dinov2, **options)


def test_models_that_do_not_fit_are_refused(dinov2, tmp_path):
    seeing = attached(dinov2)
    with pytest.raises(InputError, match="already"):
        moe_jax.attach(seeing, tower=dinov2)
    text = moe_jax.save(moe_jax.tiny_model(), tmp_path / "text")
    with pytest.raises(InputError, match="image encoder"):
        moe_jax.attach(text, tower=text)
    with pytest.raises(FileNotFoundError):
        moe_jax.attach(text, tower=tmp_path / "nothing")
    assert jax.tree.leaves(nnx.state(seeing.decoder.vision))


@pytest.fixture(scope="module")
def folder_of_pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(1)
    for number in range(60):
        pixels = rng.integers(0, 256, (5, 5, 3), np.uint8).repeat(4, 0).repeat(4, 1)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (folder / "notes.txt").write_text("no picture")
    return folder


@long
@pytest.mark.parametrize("steps", first(1, STEPS, "pool:2,linear", "linear:unbiased,gelu,linear"))
def test_a_whitened_projector_gives_what_differs_and_looks_like_embeddings(dinov2, folder_of_pictures, steps):
    model = attached(dinov2, projector=steps, pictures=folder_of_pictures)
    vision, processing = model.decoder.vision, model.config.vision.processing
    seen = [pixels_of(read_picture(file), processing) for file in sorted(folder_of_pictures.glob("*.png"))]
    x = vision.features(np.stack(seen)[:, None])[:, 0]
    products = [index for index, step in enumerate(vision.projector) if hasattr(step, "kernel")]
    for index, step in enumerate(vision.projector):
        x = step(x)
        if index == products[0] and len(products) > 1:
            rows = np.asarray(x).reshape(-1, x.shape[-1])
            np.testing.assert_allclose(rows.std(axis=0), 1, rtol=2e-2)
            if "unbiased" not in steps:
                np.testing.assert_allclose(rows.mean(axis=0), 0, atol=1e-2)
    embeddings, rows = np.asarray(model.source.read("embed/embedding")), np.asarray(x).reshape(-1, x.shape[-1])
    if steps != "linear:unbiased":
        np.testing.assert_allclose(rows.mean(axis=0), embeddings.mean(axis=0), atol=1e-4)
    assert np.std(rows - rows.mean(axis=0)) == pytest.approx(np.std(embeddings - embeddings.mean(axis=0)), rel=1e-2)


def test_pictures_that_do_not_do(dinov2, folder_of_pictures, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        attached(dinov2, pictures=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no picture in"):
        attached(dinov2, pictures=tmp_path)
    shutil.copy(folder_of_pictures / "0.png", tmp_path / "a.png")
    with pytest.raises(InputError, match="expected at least"):
        attached(dinov2, pictures=tmp_path)
    with pytest.raises(InputError, match="no linear step"):
        attached(dinov2, projector="norm", pictures=folder_of_pictures, size=16)
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.raises(InputError, match="b.png"):
        attached(dinov2, pictures=tmp_path)
