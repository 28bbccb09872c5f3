"""MoE-LLaVA and Med-MoE: against a plain program in float64, and through the commands."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from moe_jax.conversion.hugging_face_dir import HuggingFaceDirectory
from moe_jax.conversion.vision_formats.elsewhere import Elsewhere
from moe_jax.model_io.loading import load_model
from tests.support.hf_checkpoints import write_checkpoint
from tests.support.tiers import one_in
from tests.vision import plain_moe_llava
from tests.vision.moe_llava_checkpoints import KINDS, TOWER, Kind, config_of, random_values, shapes_of, tower_shapes

PICTURES = np.random.default_rng(3).integers(0, 256, (2, 2, 12, 12, 3), np.uint8)
# One picture in the first row, two in the second one; nine features each.
ROWS = ([5, 9, plain_moe_llava.PICTURE, 33, 2, 60, 17, 4, 8, 12, 40, 41, 3, 7, 50, 51],
        [plain_moe_llava.PICTURE, 6, 7, plain_moe_llava.PICTURE, 63, 11, 20, 21])  # fmt: skip


def with_slots(row: list[int]) -> tuple[list[int], list[int]]:
    """Returns ids with a token for every feature of a picture, and the slots of the features."""
    ids, slots = [], []
    for token in row:
        is_picture = token == plain_moe_llava.PICTURE
        start = max(slots, default=0) + 1
        slots += range(start, start + 9) if is_picture else [0]
        ids += [0] * 9 if is_picture else [token]
    return ids, slots


def written(folder, kind: Kind):
    """Writes a checkpoint without its tower, and that in a directory of its own."""
    config = config_of(kind)
    tensors = random_values(shapes_of(kind, config))
    own = {name: value for name, value in tensors.items() if ".image_tower." not in name}
    tower = folder / "tower"
    tower.mkdir()
    (tower / "config.json").write_text(json.dumps(TOWER))
    start = next(name for name in tensors if ".image_tower." in name).partition("vision_model.")[0]
    save_file({name: tensors[start + name] for name in tower_shapes(TOWER)}, tower / "model.safetensors")
    return write_checkpoint(folder / "model", config, own), tower, config, tensors


@one_in(3)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_logits(kind, tmp_path, strict_numerics):
    folder, tower, config, tensors = written(tmp_path, kind)
    precise = {name: value.astype(np.float64) for name, value in tensors.items()}
    expected = [
        plain_moe_llava.logits(config, TOWER, precise, row, pictures)
        for row, pictures in zip(ROWS, PICTURES, strict=True)
    ]
    model = load_model(HuggingFaceDirectory(folder, elsewhere=Elsewhere(vision_tower=tower)))
    run = nnx.jit(lambda model, ids, pixels, slots: model(ids, pixels=pixels, slots=slots).logits)
    ids, slots = (jnp.asarray(part) for part in zip(*map(with_slots, ROWS), strict=True))
    got = np.asarray(run(model, ids, jnp.asarray(PICTURES), slots))
    for row, reference in zip(got, expected, strict=True):
        assert np.abs(row - reference).max() <= 2e-5 * np.abs(reference).max()
