"""Checkpoints of LLaVA: to us and back bit for bit, other names of tensors, upcycled, and what is refused."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from rich.console import Console

import moe_jax
from moe_jax.conversion import HuggingFaceDirectory, convert, export
from moe_jax.core.errors import InputError
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.hf_checkpoints import assert_same_bits, read_tensors
from tests.support.tiers import long, one_in
from tests.support.vision_models import LLAVAS, batch_of, made_llava, normalised

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import save_file  # noqa: E402

QUIET = Console(quiet=True)
# What of a LlavaConfig the model computes with, and what else is to stay.
KEYS = (
    *("image_token_index", "image_seq_length", "projector_hidden_act", "vision_feature_select_strategy"),
    *("vision_feature_layer", "multimodal_projector_bias"),
)
# What pools a picture (SigLIP), and stands for hidden patches in training (DINOv2): no feature passes them.
LEFT_OUT = ("vision_tower.head.", "vision_tower.embeddings.mask_token")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """name -> a folder in which Transformers saved a case of `LLAVAS`."""
    root = tmp_path_factory.mktemp("llavas")

    def save(name: str) -> pathlib.Path:
        if not (root / name).exists():
            made_llava(name).save_pretrained(root / name)
        return root / name

    return save


def changed(folder: pathlib.Path, to: pathlib.Path, keys=None, rename=None) -> pathlib.Path:
    """A copy of a checkpoint with other keys, or other names of tensors; a key that is None is removed."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    config = {key: value for key, value in {**config, **(keys or {})}.items() if value is not None}
    (to / "config.json").write_text(json.dumps(config))
    if rename is not None:
        tensors = {rename(name): value for name, value in read_tensors(to).items()}
        save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def loaded(folder: pathlib.Path):
    """The model of Transformers, of whose tensors none is missing, unexpected or of another shape."""
    model, report = transformers.LlavaForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def their_logits(model, folder: pathlib.Path):
    vision = HuggingFaceDirectory(folder).config.vision
    assert vision is not None
    count = 4 + (vision.drop_first < bool(vision.tower.patches and vision.tower.patches.class_token))
    count -= not (vision.tower.patches and vision.tower.patches.class_token) and vision.drop_first
    seen = batch_of((0, 1, 3), count, 24, vision.processing.size)
    pixels = normalised(seen.pictures, vision.processing.mean, vision.processing.std)
    with torch.no_grad():
        return model(torch.tensor(seen.ids), pixel_values=pixels).logits.numpy()


@one_in(len(LLAVAS))
@pytest.mark.parametrize("name", LLAVAS)
def test_round_trip(checkpoint, tmp_path, name):
    folder = changed(checkpoint(name), tmp_path / "given", {"image_seq_length": 4, "_note": {"kept": [1]}})
    convert(folder, tmp_path / "ours", console=QUIET)
    export(ModelDirectory(tmp_path / "ours"), tmp_path / "back", console=QUIET)
    tensors = {key: value for key, value in read_tensors(folder).items() if not key.startswith(LEFT_OUT)}
    assert_same_bits(read_tensors(tmp_path / "back"), tensors)
    given, back = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("given", "back"))
    assert back["_note"] == given["_note"]
    theirs = [transformers.LlavaConfig.from_pretrained(tmp_path / one) for one in ("given", "back")]
    assert [getattr(theirs[0], key) for key in KEYS] == [getattr(theirs[1], key) for key in KEYS]
    parts = [{**one.text_config.to_dict(), "vision": one.vision_config.to_dict()} for one in theirs]
    for part in parts:
        # Where they come from, what is left out, and what follows from the rest.
        for key in ("architectures", "dtype", "transformers_version", "_name_or_path", "head_dim"):
            part.pop(key, None)
            part["vision"].pop(key, None)
        for key in ("vision_use_head", "use_mask_token"):
            part["vision"].pop(key, None)
        part.pop("final_logit_softcapping", None)  # of the head that the language model would have alone
    assert parts[0] == parts[1]
    before, after = (their_logits(loaded(tmp_path / one), folder) for one in ("given", "back"))
    np.testing.assert_allclose(before, after, atol=1e-5)


@one_in(2)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_names_with_the_infix_of_older_files(checkpoint, tmp_path, name):
    def older(tensor: str) -> str:
        return tensor.replace("vision_tower.", "vision_tower.vision_model.", 1)

    folder = changed(checkpoint(name), tmp_path / "older", {"image_token_index": None, "image_token_id": 95}, older)
    ours, theirs = HuggingFaceDirectory(folder), HuggingFaceDirectory(checkpoint(name))
    assert ours.config == theirs.config and list(ours.specs()) == list(theirs.specs())
    for path in ours.specs():
        np.testing.assert_array_equal(ours.read(path), theirs.read(path), err_msg=path)


def test_names_of_the_modules_of_transformers(checkpoint, tmp_path):
    made_llava("mixtral").save_pretrained(tmp_path / "modules", save_original_format=False)
    ours, theirs = HuggingFaceDirectory(tmp_path / "modules"), HuggingFaceDirectory(checkpoint("mixtral"))
    assert "lm_head.weight" in ours.checkpoint.tensors
    for path in theirs.specs():
        np.testing.assert_array_equal(ours.read(path), theirs.read(path), err_msg=path)


def test_tied_where_the_whole_says_so(checkpoint, tmp_path):
    config = HuggingFaceDirectory(changed(checkpoint("llama"), tmp_path / "a", {"tie_word_embeddings": True})).config
    assert config.tie_embeddings and not HuggingFaceDirectory(checkpoint("llama")).config.tie_embeddings


def test_upcycled_leaves_with_a_mixtral_inside(checkpoint, tmp_path):
    dense = checkpoint("llama")
    moe_jax.upcycle(str(dense), tmp_path / "moe", experts=4, top_k=2)
    moe_jax.export(tmp_path / "moe", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["text_config"]["model_type"]) == ("llava", "mixtral")
    before, after = their_logits(loaded(dense), dense), their_logits(loaded(tmp_path / "hf"), dense)
    assert np.abs(after - before).max() <= 1e-5 * np.abs(before).max()  # all experts are still the one


@long
def test_an_upcycled_model_answers_in_transformers_what_it_answers_here(checkpoint, tmp_path):
    """20 pictures, 32 greedy tokens; experts that differ, and every second FFN dense."""
    dense = checkpoint("llama")
    moe_jax.upcycle(str(dense), tmp_path / "moe", experts=4, top_k=2, every=2, first=0, noise=0.5)
    moe_jax.export(tmp_path / "moe", tmp_path / "hf")
    model, theirs = moe_jax.load(tmp_path / "moe"), loaded(tmp_path / "hf")
    vision = model.config.vision
    assert vision is not None
    pictures = np.random.default_rng(0).integers(0, 256, (20, *vision.processing.size, 3), np.uint8)
    ids = [[1, vision.placeholder, 7 + row % 5, 9] for row in range(20)]
    ours = moe_jax.generate(model, ids, image=list(pictures), max_new_tokens=32)
    eos = set(model.config.eos_ids)
    for picture, one in zip(pictures, ours, strict=True):
        pixels = torch.tensor(normalised([picture], vision.processing.mean, vision.processing.std))
        with torch.no_grad():
            made = theirs.generate(
                torch.tensor([one.prompt_ids]), pixel_values=pixels, max_new_tokens=32, do_sample=False
            )
        found = made[0, len(one.prompt_ids) :].tolist()
        assert [token for token in found if token not in eos] == one.ids
    assert len({tuple(one.ids) for one in ours}) > 5


REFUSED = {
    "projector_hidden_act": ({"projector_hidden_act": "sin"}, "sin"),
    "select": ({"vision_feature_select_strategy": "cls"}, "'default' or 'full'"),
    "layer": ({"vision_feature_layer": 9}, "features"),
    "text": ({"text_config": 3}, "text_config"),
    "unknown": ({"image_grid_pinpoints": [[336, 672]]}, "image_grid_pinpoints"),
    "placeholder": ({"image_token_index": "x"}, "image_token_index"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_configs(checkpoint, tmp_path, case):
    keys, named = REFUSED[case]
    with pytest.raises(InputError) as error:
        HuggingFaceDirectory(changed(checkpoint("llama"), tmp_path / "wrong", keys))
    assert named in str(error.value) and "\n" not in str(error.value)
