"""The eye is a part of the model everywhere: at step 0, in what verbs keep of it, in sizes and words."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.checks.step0 import Probe, probe_pictures, probe_tokens
from moe_jax.checks.streamed_model import StreamedModel
from moe_jax.commands import cli
from moe_jax.conversion.writing.model_card import model_card
from moe_jax.core.errors import InputError
from moe_jax.model_io.loading import disk_paths, load_model, model_leaves
from moe_jax.nn.projector import tokens_per_picture
from moe_jax.peft.trained import trainable_paths, trained_groups
from tests.support.dense_models import dense_config, random_leaves
from tests.support.moe_models import MemorySource
from tests.support.numerics import logits_of
from tests.support.seeing_models import BANKS, clip_large, picture_batch, pictures, seeing, tower_config
from tests.support.tiers import long, one_in

CONFIG = seeing(dense_config(num_layers=2))


@pytest.fixture(scope="module")
def dense() -> moe_jax.Model:
    return moe_jax.Model(load_model(MemorySource(CONFIG, random_leaves(CONFIG))))


def pictured(model: moe_jax.Model) -> np.ndarray:
    """Logits of rows with pictures."""
    batch = picture_batch(CONFIG, 24, (2, 12), (5,))
    return np.asarray(logits_of(model.decoder, *[batch["tokens"]], pixels=batch["pixels"], slots=batch["slots"]))


def of_eye(model: moe_jax.Model) -> dict[str, bytes]:
    leaves = model_leaves(model.decoder)
    return {path: np.asarray(leaf).tobytes() for path, leaf in leaves if path.startswith("vision/")}


def test_the_tower_is_trained_where_it_is_named_and_nowhere_else(dense):
    paths = set().union(*(disk_paths(CONFIG, path) for path in trainable_paths(dense.decoder)))
    assert not [path for path in paths if path.startswith("vision/tower/")]
    assert {"vision/projector/0/kernel", "embed/embedding", "layers/1/mlp/up/kernel"} <= paths
    named = trainable_paths(dense.decoder, train=["vision/tower/layers/.*"])
    assert named and all(path.startswith("vision/tower/stack/") for path in named)
    groups = trained_groups(CONFIG, {path for one in named for path in disk_paths(CONFIG, one)})
    assert "vision/tower/layers/{0..2}/mlp/up/kernel" in [group.pattern for group in groups]


@one_in(2)
@pytest.mark.parametrize("features", [(-2,), (0, 2, -1)], ids=str)
def test_a_streamed_model_sees_what_the_decoder_sees(features):
    config = seeing(dense_config(num_layers=1), features=features)
    config = dataclasses.replace(
        config,
        vision=dataclasses.replace(config.vision, tower=dataclasses.replace(config.vision.tower, final_norm=True)),
    )
    source = MemorySource(config, random_leaves(config))
    tokens, given = probe_tokens(config, 0), probe_pictures(config, 0)
    streamed = StreamedModel(config, source.specs(), tokens, pictures=given)
    expected = logits_of(load_model(source), jnp.asarray(tokens), **given._asdict())
    np.testing.assert_allclose(streamed.logits(source.read), expected, rtol=1e-5, atol=1e-5)
    assert sorted({*given.slots.flat}) == list(range(tokens_per_picture(config.vision, config.d_model) + 1))
    # The last layer is read only where something is taken of it.
    read = []
    streamed.logits(lambda path: read.append(path) or source.read(path))
    assert any("tower/layers/2" in path for path in read) == (-1 in features)


@one_in(3)
@pytest.mark.parametrize("bank", BANKS)
def test_an_upcycled_model_begins_as_the_dense_one_with_pictures_too(dense, bank):
    moe = moe_jax.upcycle(dense, experts=4, every=1, **BANKS[bank])
    assert moe.config.vision == CONFIG.vision and of_eye(moe) == of_eye(dense)
    measured = moe.lineage[-1]["measured"]
    assert measured["step0_max_abs_difference"] <= measured["step0_allowed"]
    # Products of whole experts add up in another order than that of one FFN, see test_step0_bits; what pictures become
    # is the same to the bit.
    pixels = pictures(2, 1)
    np.testing.assert_array_equal(moe.decoder.see(pixels), dense.decoder.see(pixels))
    np.testing.assert_allclose(pictured(moe), pictured(dense), atol=measured["step0_allowed"])


def test_the_check_sees_pictures(dense, monkeypatch):
    changed = lambda read: lambda path: read(path) + ("vision/" in path) * np.float32(0.1)  # noqa: E731
    compare = Probe.compare
    monkeypatch.setattr(Probe, "compare", lambda self, read, *rest, **more: compare(self, changed(read), *rest, **more))
    with pytest.raises(InputError, match="logits differ"):
        moe_jax.upcycle(dense, experts=4, every=1)


@long
def test_med_begins_elsewhere(dense):
    moe = moe_jax.upcycle(dense, experts=4, every=1, universal="med")
    before, after = pictured(dense), pictured(moe)
    assert of_eye(moe) == of_eye(dense) and np.abs(after - before).max() > 0.1
    assert moe.source.lineage[-1]["measured"]["step0_max_abs_difference"] > 0.1


@one_in(4)
@pytest.mark.parametrize("verb", ["compress", "adapt", "merge", "pesc"])
def test_verbs_of_the_language_side_leave_the_eye_to_the_bit(dense, verb):
    if verb == "compress":
        moe = moe_jax.upcycle(dense, experts=4, every=1, step0_check=False)
        made = moe_jax.compress(moe, method="quantize", bits=4)
    elif verb == "pesc":
        made = moe_jax.upcycle(dense, method="pesc", experts=4, every=1, rest="qlora:2", adapter=4)
    else:
        made = moe_jax.adapt(dense, method="lora", adapter="lora:2", targets="q,v,up")
        made = moe_jax.merge(made) if verb == "merge" else made
    assert made.config.vision == CONFIG.vision and of_eye(made) == of_eye(dense)
    assert np.isfinite(pictured(made)).all()


def test_plan_counts_the_eye():
    # CLIP-L/14 of 336 pixels, and LLaVA's projector to a width of 2048, as published.
    config = dataclasses.replace(dense_config(num_layers=2, d_model=2048), vision=clip_large(), max_positions=2048)
    vision = moe_jax.plan(config, pictures=2).vision
    assert (vision.tower_params, vision.projector_params) == (303_507_456, 6_295_552)
    assert (vision.tokens_per_picture, vision.layers_run) == (576, 23)
    assert vision.tower_bytes == 4 * 303_507_456
    # A forward pass over 577 tokens, of which each is multiplied with 12 d^2 entries of every layer and sees all.
    layers = 23 * (2 * 577 * 12 * 1024**2 + 4 * 577**2 * 1024)
    assert vision.tower_flops == layers + 2 * 576 * 588 * 1024
    assert vision.projector_flops == 2 * 576 * (1024 + 2048) * 2048
    of_text = 2048 * moe_jax.plan(config).train_flops_per_token
    of_pictures = 2 * (vision.tower_flops + 3 * vision.projector_flops)
    assert vision.tower_share == pytest.approx(2 * vision.tower_flops / (of_text + of_pictures))
    # Of a token of text, the eye is no part.
    blind = moe_jax.plan(dataclasses.replace(config, vision=None))
    assert moe_jax.plan(config).active_params == blind.active_params and blind.vision is None
    for many, planned in ((1, dataclasses.replace(config, vision=None)), (4, config), (-1, config)):
        with pytest.raises(InputError, match="pictures"):
            moe_jax.plan(planned, pictures=many)


@long
def test_the_compiler_counts_as_many_operations():
    # The tower of three layers is cut before the last two, whose outputs are taken: no layers are in a loop.
    config = seeing(dense_config(num_layers=1, d_model=64), tower=tower_config(width=64, hidden=256), features=(1, 2))
    vision = moe_jax.nn.Vision(config.vision, 64, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32"))
    compiled = jax.jit(lambda vision, pixels: vision(pixels)).lower(vision, pictures(1, 1)).compile()
    planned = moe_jax.plan(config).vision
    assert compiled.cost_analysis()["flops"] == pytest.approx(planned.tower_flops + planned.projector_flops, rel=0.2)


def test_the_eye_is_a_part_in_words(dense, tmp_path, capsys):
    path = tmp_path / "model"
    moe_jax.save(dense, path)
    assert of_eye(moe_jax.load(path)) == of_eye(dense)
    assert "sees with Vision" in repr(dense.decoder) or "sees with" in str(dense.decoder)
    words = "llava: pictures of 12 x 12 pixels through clip_vision_model, 3 layers of width 16, features -2"
    assert cli.main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert words in shown and "vision/tower/layers/{0..2}/attention/q/kernel" in shown
    assert cli.main(["plan", str(path), "--pictures", "1"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("tower  ", "projector  ", "tokens per picture", "tower's share"))
    assert cli.main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert words in page and "image encoder" in page and "projector" in page
    capsys.readouterr()
    card = model_card(CONFIG, [], library="transformers").decode()
    assert f"It sees ({words}" in card and "pipeline_tag: image-text-to-text" in card


def test_the_fingerprint_is_of_the_eye_too(dense):
    leaves = {path: np.asarray(leaf) for path, leaf in model_leaves(dense.decoder)}
    changed = leaves | {path: leaf + 1 for path, leaf in leaves.items() if path == "vision/projector/2/bias"}
    other = moe_jax.Model(load_model(MemorySource(CONFIG, changed)))
    assert dense.source.fingerprint() != other.source.fingerprint()


@pytest.mark.parametrize(
    "arguments", [["--propose", "--platform", "v5p-16"], ["--mesh", "fsdp=8", "--platform", "v5p"]]
)
def test_plans_that_cannot_count_pictures_refuse_them(dense, tmp_path, capsys, arguments):
    recipe = ["--train", "recipe.toml"] if "--propose" in arguments else []
    assert cli.main(["plan", str(tmp_path), *recipe, *arguments, "--pictures", "1"]) == 2
    assert "--pictures: not with" in capsys.readouterr().err


def test_adapters_have_no_place_in_peft(dense, tmp_path, capsys):
    moe_jax.save(dense, tmp_path / "model")
    moe_jax.adapt(tmp_path / "model", tmp_path / "lora", method="lora", adapter="lora:2", targets="q")
    assert cli.main(["export", str(tmp_path / "lora"), str(tmp_path / "peft"), "--format", "peft"]) == 2
    assert "image encoder" in capsys.readouterr().err and not (tmp_path / "peft").exists()
