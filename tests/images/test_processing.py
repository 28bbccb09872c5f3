"""Pixels are those of Transformers' image processors of Pillow, to the bit; configs that are not known are refused."""

import json
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from moe_jax.core.errors import InputError
from moe_jax.images import processing as module
from moe_jax.images.decoding import MAX_PIXELS
from moe_jax.images.normalization import normalized
from moe_jax.images.processing import ImageProcessing, pixels_of, read_processing, write_processing
from moe_jax.images.resampling import FILTERS, enlarged_part
from tests.support.tiers import examples

transformers = pytest.importorskip("transformers")
PROCESSORS = {
    "clip": transformers.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
    # A cut that is larger than the resized picture, in the other filter.
    "framed": transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 40}, crop_size={"height": 57, "width": 48}, resample=2
    ),
    "siglip": transformers.SiglipImageProcessorPil(size={"height": 48, "width": 40}),
}
SIDES = st.integers(1, 300)


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), np.uint8)


def processing_of(processor, **more) -> ImageProcessing:
    return read_processing(json.loads(processor.to_json_string()), **more)


@pytest.mark.parametrize("name", PROCESSORS)
@settings(max_examples=examples(70))
@given(height=SIDES, width=SIDES)
@example(height=1, width=1)
@example(height=1, width=4000)
@example(height=4000, width=1)
def test_pixels_are_those_of_transformers(name, height, width):
    processor, processing = PROCESSORS[name], processing_of(PROCESSORS[name])
    given = picture(height, width)
    theirs = processor(Image.fromarray(given), do_rescale=False, do_normalize=False)["pixel_values"][0]
    ours = pixels_of(given, processing)
    np.testing.assert_array_equal(ours, np.moveaxis(theirs, 0, -1), strict=True)
    theirs = processor(Image.fromarray(given))["pixel_values"][0]
    np.testing.assert_allclose(normalized(jnp.asarray(ours), processing), np.moveaxis(theirs, 0, -1), atol=1e-6)


@settings(max_examples=examples(30))
@given(height=SIDES, width=SIDES)
def test_a_padded_picture_is_in_the_middle_of_a_square_of_the_mean(height, width):
    given, side = picture(height, width), max(height, width)
    square = Image.new("RGB", (side, side), (122, 116, 104))  # LLaVA's, of CLIP's mean
    square.paste(Image.fromarray(given), ((side - width) // 2, (side - height) // 2))
    theirs = PROCESSORS["clip"](square, do_rescale=False, do_normalize=False)["pixel_values"][0]
    ours = pixels_of(given, processing_of(PROCESSORS["clip"], pad=True))
    np.testing.assert_array_equal(ours, np.moveaxis(theirs, 0, -1))


@settings(max_examples=examples(60))
@given(
    sides=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    more=st.tuples(st.integers(0, 90), st.integers(0, 90)),
    place=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    name=st.sampled_from(sorted(FILTERS)),
)
def test_a_part_of_an_enlarged_picture_is_that_part_of_the_whole(sides, more, place, name):
    given, (height, width) = picture(*sides), np.add(sides, more).tolist()
    whole = np.asarray(Image.fromarray(given).resize((width, height), getattr(Image.Resampling, name.upper())))
    top, left = int(place[0] * (height - 1)), int(place[1] * (width - 1))
    rows, columns = min(7, height - top), min(5, width - left)
    part = enlarged_part(given, (height, width), top, left, rows, columns, name)
    np.testing.assert_array_equal(part, whole[top : top + rows, left : left + columns])


@settings(max_examples=examples(30))
@given(height=SIDES, width=SIDES)
@example(height=1, width=300)
@example(height=300, width=1)
def test_a_long_picture_is_padded_without_the_square(height, width):
    given = picture(height, width)
    with pytest.MonkeyPatch.context() as patch:
        for processor in PROCESSORS.values():
            processing = processing_of(processor, pad=True)
            patch.setattr(module, "_MOST_SQUARE", 10**6)
            expected = pixels_of(given, processing)
            patch.setattr(module, "_MOST_SQUARE", 1000)
            np.testing.assert_array_equal(pixels_of(given, processing), expected)
    with pytest.raises(InputError, match="too long"):
        pixels_of(np.zeros((1, 10**6, 3), np.uint8), processing_of(PROCESSORS["clip"], pad=True))


@pytest.mark.parametrize("name", PROCESSORS)
def test_llavas_processor_pads_as_its_file_says(name):
    processing = processing_of(PROCESSORS[name], pad=True)
    keys = write_processing(processing)
    assert read_processing(keys) == processing
    assert read_processing(keys | {"do_pad": False}) == processing_of(PROCESSORS[name])
    processor = transformers.LlavaImageProcessorPil(**{key: keys[key] for key in keys if key != "image_processor_type"})
    for sides in ((3, 90), (120, 31)):
        theirs = processor(Image.fromarray(picture(*sides)), do_rescale=False, do_normalize=False)["pixel_values"][0]
        np.testing.assert_array_equal(pixels_of(picture(*sides), processing), np.moveaxis(theirs, 0, -1))
    with pytest.raises(InputError, match="do_pad"):
        read_processing(keys | {"image_processor_type": "IdeficsImageProcessor"})


@pytest.mark.parametrize("sides", [(1, 4000), (4000, 1), (2, 4001)])
@pytest.mark.parametrize("name", ["clip", "framed"])
def test_a_long_picture_is_enlarged_in_its_middle_alone(name, sides, monkeypatch):
    processing, given = processing_of(PROCESSORS[name]), picture(*sides)
    expected = pixels_of(given, processing)
    monkeypatch.setattr(module, "_MOST_WHOLE", 1000)
    monkeypatch.setattr(module, "_resized", None)
    np.testing.assert_array_equal(pixels_of(given, processing), expected)


@pytest.mark.parametrize("sides", [(1, MAX_PIXELS), (MAX_PIXELS, 1)])
def test_the_longest_picture_takes_little_memory(sides):
    given = np.broadcast_to(np.uint8(9), (*sides, 3))  # one byte
    tracemalloc.start()
    try:
        assert pixels_of(given, processing_of(PROCESSORS["framed"])).max() == 9
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"do_flip": True}, "do_flip"),
        ({"do_resize": False}, "do_resize"),
        ({"do_center_crop": False}, "do_center_crop"),
        ({"resample": 7}, "resample=7"),
        ({"size": {"longest_edge": 5}}, "size="),
        ({"crop_size": "large"}, "crop_size="),
        ({"size": 10**9}, "4096"),
        ({"image_mean": None}, "image_mean"),
        ({"image_std": [0, 1, 1]}, "std"),
    ],
)
def test_a_config_whose_pixels_are_not_known_is_refused(changes, named):
    config = json.loads(PROCESSORS["clip"].to_json_string()) | changes
    with pytest.raises(InputError) as error:
        read_processing(config)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_integers_stand_for_sides_and_what_is_switched_off_is_not_done():
    config = json.loads(PROCESSORS["clip"].to_json_string())
    assert read_processing(config | {"size": 56, "crop_size": 56}) == read_processing(config)
    plain = read_processing(config | {"do_rescale": False, "do_normalize": False})
    assert (plain.rescale, plain.mean, plain.std) == (1.0, (0.0,) * 3, (1.0,) * 3)
