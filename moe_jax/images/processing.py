"""Pictures to the pixels of a model, to the bit as Transformers' image processors of Pillow make them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from moe_jax.core.errors import InputError, shown
from moe_jax.images.decoding import MAX_PIXELS
from moe_jax.images.image_config import RESAMPLING
from moe_jax.images.image_config import ImageProcessing as ImageProcessing
from moe_jax.images.resampling import enlarged_part

_PILLOW = {name: Image.Resampling[name.upper()] for name in RESAMPLING}
# A resized picture of more pixels is made in that part alone which is kept. As no picture has more before, it is one
# that becomes larger.
_MOST_WHOLE = MAX_PIXELS
# A picture that would be padded to more pixels is made without the square.
_MOST_SQUARE = MAX_PIXELS
# `processor_class` and the like say what Python class read the file.
_HARMLESS = frozenset({"image_processor_type", "feature_extractor_type", "processor_class", "_valid_processor_keys",
                       "do_convert_rgb", "do_convert_annotations", "data_format", "input_data_format", "device",
                       "return_tensors", "default_to_square", "disable_grouping", "image_seq_length"})  # fmt: skip


def read_processing(config: Mapping[str, Any], *, pad: bool = False) -> ImageProcessing:
    """Reads a preprocessor_config.json.

    Args:
      config: its keys.
      pad: see `ImageProcessing`, where the config of the model says it; of LLaVA's image processor its own file does.

    Raises:
      InputError: a key that is not known, or a result whose size depends on the picture.
    """
    config = dict(config)
    # Others pad to the largest picture of a batch, or in tiles.
    if not config.get("do_pad") or config.get("image_processor_type") in _PADDING:
        pad = bool(config.pop("do_pad", False)) or pad
    given = {key: config.pop(key, default) for key, default in _DEFAULTS.items()}
    if unknown := sorted(config.keys() - _HARMLESS):
        raise InputError(f"preprocessor_config.json: {', '.join(unknown)}: not known, and may change the pixels")
    size, crop = _sides(given["size"], "size"), _sides(given["crop_size"], "crop_size")
    shortest = size.get("shortest_edge")
    result = crop if given["do_center_crop"] else size
    if not given["do_resize"] or "height" not in result or (shortest is None and given["do_center_crop"]):
        raise InputError(
            "preprocessor_config.json: expected do_resize with a size of height and width, or with shortest_edge and "
            "do_center_crop: pixels of other configs have no fixed size"
        )
    names = {int(value): name for name, value in _PILLOW.items()}
    if given["resample"] not in names:
        raise InputError(f"preprocessor_config.json: resample={shown(given['resample'])}: known are {names}")
    normalises = given["do_normalize"]
    if normalises and None in (given["image_mean"], given["image_std"]):
        raise InputError("preprocessor_config.json: do_normalize needs image_mean and image_std")
    return ImageProcessing(
        size=(result["height"], result["width"]),
        shortest=shortest,
        pad=pad,
        resample=names[given["resample"]],  # type: ignore[arg-type]
        rescale=given["rescale_factor"] if given["do_rescale"] else 1.0,
        mean=tuple(given["image_mean"]) if normalises else (0.0, 0.0, 0.0),
        std=tuple(given["image_std"]) if normalises else (1.0, 1.0, 1.0),
    )


def write_processing(processing: ImageProcessing) -> dict[str, Any]:
    """Returns the keys of a preprocessor_config.json that `read_processing` reads the same from.

    They name the class of Transformers that pads, or else the one that cuts out the middle, or the one that does not.
    """
    height, width = processing.size
    cuts = processing.shortest is not None
    sides = {"height": height, "width": width}
    codes = {name: int(value) for name, value in _PILLOW.items()}
    name = "CLIPImageProcessor" if cuts else "SiglipImageProcessor"
    return {
        "image_processor_type": _PADDING[0] if processing.pad else name,
        **({"do_pad": True} if processing.pad else {}),
        "do_resize": True,
        "size": {"shortest_edge": processing.shortest} if cuts else sides,
        "resample": codes[processing.resample],
        "do_center_crop": cuts,
        **({"crop_size": sides} if cuts else {}),
        "do_rescale": True,
        "rescale_factor": processing.rescale,
        "do_normalize": True,
        "image_mean": list(processing.mean),
        "image_std": list(processing.std),
        "do_convert_rgb": True,
    }


_PADDING = ("LlavaImageProcessor", "LlavaImageProcessorFast", "LlavaImageProcessorPil")
_DEFAULTS = {"do_resize": True, "size": None, "resample": 3, "do_center_crop": False, "crop_size": None,
             "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": None,
             "image_std": None}  # fmt: skip


def _sides(value: Any, key: str) -> dict[str, int]:
    """Returns `height` and `width`, or `shortest_edge`; an integer stands for either, as in old files."""
    if isinstance(value, int):
        return {"shortest_edge": value} if key == "size" else {"height": value, "width": value}
    if value is None:
        return {}
    if isinstance(value, Mapping) and (value.keys() == {"shortest_edge"} or value.keys() == {"height", "width"}):
        return dict(value)
    raise InputError(f"preprocessor_config.json: {key}={shown(value)}: expected height and width, or shortest_edge")


def pixels_of(picture: UInt8[np.ndarray, "H W 3"], processing: ImageProcessing) -> UInt8[np.ndarray, "S S 3"]:
    """Pads, resizes and crops; the result is normalised on the device (`normalization`), in a quarter of the bytes.

    To the bit as `CLIPImageProcessorPil` and `SiglipImageProcessorPil` of Transformers do.

    Raises:
      InputError: for a picture so long that even what padding leaves of it takes too much memory.
    """
    height, width = processing.size
    if processing.pad:
        if max(picture.shape) ** 2 > _MOST_SQUARE:
            if processing.shortest is None:
                return _square_resized(picture, (height, width), processing)
            small = _square_resized(picture, (processing.shortest, processing.shortest), processing)
            return _middle(small, height, width)
        picture = _square(picture, processing)
    if processing.shortest is None:
        return _resized(picture, (height, width), processing.resample)
    full = _in_proportion(picture.shape[:2], processing.shortest)
    if full[0] * full[1] <= _MOST_WHOLE:
        return _middle(_resized(picture, full, processing.resample), height, width)
    top, left = max(0, (full[0] - height) // 2), max(0, (full[1] - width) // 2)
    rows, columns = min(height, full[0]), min(width, full[1])
    return _middle(enlarged_part(picture, full, top, left, rows, columns, processing.resample), height, width)


def _square(picture: UInt8[np.ndarray, "H W 3"], processing: ImageProcessing) -> UInt8[np.ndarray, "L L 3"]:
    height, width, _ = picture.shape
    if height == width:
        return picture
    side = max(height, width)
    square = np.empty((side, side, 3), np.uint8)
    square[:] = _color_around(processing)
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = picture
    return square


def _color_around(processing: ImageProcessing) -> list[int]:
    return [int(value * 255) for value in processing.mean]


def _square_resized(
    picture: UInt8[np.ndarray, "H W 3"], size: tuple[int, int], processing: ImageProcessing
) -> UInt8[np.ndarray, "h w 3"]:
    """Does the same as `_square` and `_resized`, without the square: of a line of pixels it would be many gigabytes.

    Pillow makes rows shorter before it makes columns shorter, so that some rows at a time are enough.
    """
    height, width, _ = picture.shape
    side = max(height, width)
    if side * size[1] > MAX_PIXELS:
        raise InputError(
            f"a picture of {width:,} x {height:,} pixels is too long to be padded to a square; cut a part out of it"
        )
    top, left = (side - height) // 2, (side - width) // 2
    row = np.empty((1, side, 3), np.uint8)
    row[:] = _color_around(processing)
    shorter = np.repeat(_resized(row, (1, size[1]), processing.resample), side, axis=0)
    at_once = max(1, _MOST_SQUARE // side)
    for start in range(0, height, at_once):
        part = picture[start : start + at_once]
        rows = np.repeat(row, len(part), axis=0)
        rows[:, left : left + width] = part
        shorter[top + start : top + start + len(part)] = _resized(rows, (len(part), size[1]), processing.resample)
    return _resized(shorter, size, processing.resample)


def _in_proportion(size: tuple[int, int], shortest: int) -> tuple[int, int]:
    height, width = size
    longest = int(shortest * max(size) / min(size))
    return (longest, shortest) if width <= height else (shortest, longest)


def _resized(picture: UInt8[np.ndarray, "H W 3"], size: tuple[int, int], name: str) -> UInt8[np.ndarray, "h w 3"]:
    return np.asarray(Image.fromarray(picture).resize((size[1], size[0]), resample=_PILLOW[name]))


def _middle(picture: UInt8[np.ndarray, "H W 3"], height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:
    """Cuts out the middle; where the picture is smaller, black surrounds it."""
    frame = np.zeros((max(height, picture.shape[0]), max(width, picture.shape[1]), 3), np.uint8)
    top, left = -((picture.shape[0] - len(frame)) // 2), -((picture.shape[1] - frame.shape[1]) // 2)
    frame[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    top, left = (picture.shape[0] - height) // 2 + top, (picture.shape[1] - width) // 2 + left
    return frame[max(0, top) : top + height, max(0, left) : left + width]
