"""Checkpoints of InternVL and SmolVLM: to us and back bit for bit, what is said of tiles, and what is refused."""

import dataclasses
import json
import math
import pathlib
import shutil

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import moe_jax
from moe_jax.commands import cli
from moe_jax.conversion import HuggingFaceDirectory, convert, export, read_hf_config
from moe_jax.conversion.hf_config import write_hf_config
from moe_jax.conversion.table import Row
from moe_jax.conversion.vision_formats import vision_format_named
from moe_jax.core.errors import InputError
from moe_jax.files.tokenizer_files import PREPROCESSOR, PROCESSOR
from moe_jax.images.processing import pixels_of
from moe_jax.model_io.loading import leaf_specs
from moe_jax.model_io.model_dir import ModelDirectory
from moe_jax.nn.projector import tokens_per_picture
from tests.support.hf_checkpoints import assert_same_bits, read_tensors
from tests.support.tiers import long, one_in
from tests.support.vision_models import TILED, random_tiled

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

QUIET = Console(quiet=True)
SIDE = 16
# As published models have them, of other sizes.
PROCESSORS = {
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        **{"crop_to_patches": False, "min_patches": 1, "max_patches": 12, "do_resize": True, "resample": 3},
        **{"size": {"height": SIDE, "width": SIDE}, "do_rescale": True, "rescale_factor": 1 / 255},
        **{"do_normalize": True, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
    },
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        **{"do_convert_rgb": True, "do_image_splitting": True, "do_pad": True, "do_resize": True, "resample": 1},
        **{"size": {"longest_edge": 4 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
        **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
        **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": SIDE}},
    },
}
# The config of InternVL3.5-8B, but for keys that Transformers writes for itself; and of SmolVLM2-500M.
PUBLISHED = {
    "internvl": {
        **{"downsample_ratio": 0.5, "image_seq_length": 256, "image_token_id": 151671, "model_type": "internvl"},
        **{"projector_hidden_act": "gelu", "vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
        "text_config": {
            **{"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936},
            **{"rope_theta": 1000000, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "use_cache": True},
        },
        "vision_config": {
            **{"attention_bias": True, "attention_dropout": 0.0, "dropout": 0.0, "hidden_act": "gelu"},
            **{"hidden_dropout_prob": 0.0, "hidden_size": 1024, "image_size": [448, 448], "initializer_factor": 0.1},
            **{"initializer_range": 1e-10, "intermediate_size": 4096, "layer_norm_eps": 1e-6},
            **{"layer_scale_init_value": 0.1, "model_type": "internvl_vision", "norm_type": "layer_norm"},
            **{"num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": [14, 14]},
            **{"projection_dropout": 0.0, "use_absolute_position_embeddings": True, "use_mask_token": False},
            **{"use_mean_pooling": True, "use_qk_norm": False},
        },
    },
    "smolvlm": {
        **{"image_token_id": 49190, "model_type": "smolvlm", "pad_token_id": 128002, "scale_factor": 4},
        "text_config": {
            **{"head_dim": 64, "hidden_size": 960, "intermediate_size": 2560, "is_llama_config": True},
            **{"max_position_embeddings": 8192, "model_type": "llama", "neftune_noise_alpha": 0.0},
            **{"num_attention_heads": 15, "num_hidden_layers": 32, "num_key_value_heads": 5, "pad_token_id": 2},
            **{"pixel_shuffle_factor": 4, "qk_layer_norms": False, "rms_norm_eps": 1e-5, "rope_interleaved": False},
            **{"rope_theta": 100000, "use_resampler": False, "vocab_size": 49280},
        },
        **{"tie_word_embeddings": False, "use_cache": False, "use_reentrant_checkpointing": False, "vocab_size": 49280},
        "vision_config": {
            **{"hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}},
            **{"model_type": "smolvlm_vision", "num_attention_heads": 12, "patch_size": 16},
            **{"size": {"longest_edge": 2048}, "tie_word_embeddings": False, "use_base_siglip": False},
        },
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """name -> a folder in which Transformers saved a case of `TILED`, with the file of an image processor."""
    root = tmp_path_factory.mktemp("tiled")

    def save(name: str) -> pathlib.Path:
        if not (root / name).exists():
            kind, text, more = TILED[name]
            random_tiled(kind, text, **more).save_pretrained(root / name)
            (root / name / PREPROCESSOR).write_text(json.dumps(PROCESSORS[kind.lower()]))
        return root / name

    return save


def changed(folder: pathlib.Path, to: pathlib.Path, keys) -> pathlib.Path:
    """A copy of a checkpoint with other keys; those of an object in it as `object.key`."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    for key, value in keys.items():
        *outer, last = key.split(".")
        (config[outer[0]] if outer else config)[last] = value
    (to / "config.json").write_text(json.dumps(config))
    return to


def loads_whole(folder: pathlib.Path) -> None:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    _, report = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report


@one_in(len(TILED) // 2)
@pytest.mark.parametrize("name", TILED)
def test_round_trip(checkpoint, tmp_path, name):
    folder = changed(checkpoint(name), tmp_path / "given", {"_note": {"kept": [1]}, "text_config._inner": 2})
    convert(folder, tmp_path / "ours", console=QUIET)
    export(ModelDirectory(tmp_path / "ours"), tmp_path / "back", console=QUIET)
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(folder))
    given, back = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("given", "back"))
    assert back["_note"] == given["_note"] and back["text_config"]["_inner"] == 2
    assert (tmp_path / "back" / PREPROCESSOR).read_bytes() == (folder / PREPROCESSOR).read_bytes()
    assert not (tmp_path / "back" / PROCESSOR).exists()
    config = getattr(transformers, f"{TILED[name][0]}Config")
    theirs = [config.from_pretrained(tmp_path / one).to_dict() for one in ("given", "back")]
    for whole in theirs:
        for part in (whole, whole["text_config"], whole["vision_config"]):
            for key in ("architectures", "dtype", "transformers_version", "_name_or_path", "head_dim", "layer_types"):
                part.pop(key, None)
        # The whole says it, and of the head that the language model would have alone.
        for key in ("tie_word_embeddings", "final_logit_softcapping"):
            whole["text_config"].pop(key, None)
    assert theirs[0] == theirs[1]
    loads_whole(tmp_path / "back")


def test_names_of_the_modules_of_transformers(checkpoint, tmp_path):
    kind, text, more = TILED["internvl-tied"]
    random_tiled(kind, text, **more).save_pretrained(tmp_path / "modules", save_original_format=False)
    ours, theirs = HuggingFaceDirectory(tmp_path / "modules"), HuggingFaceDirectory(checkpoint("internvl-tied"))
    assert "model.language_model.norm.weight" in ours.checkpoint.tensors and ours.config == theirs.config
    for path in theirs.specs():
        np.testing.assert_array_equal(ours.read(path), theirs.read(path), err_msg=path)


@pytest.mark.parametrize("name", ["internvl", "internvl-tied", "smolvlm", "smolvlm-tied", "smolvlm-gemma"])
def test_a_head_of_its_own_is_seen_where_the_config_is_silent(checkpoint, tmp_path, name):
    """Published configs leave `tie_word_embeddings` out, whatever the tensors are."""
    folder = changed(checkpoint(name), tmp_path / "silent", {})
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert HuggingFaceDirectory(folder).config.tie_embeddings == name.endswith("tied")


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configs_are_known_and_counted_as_transformers_does(kind):
    config = read_hf_config(PUBLISHED[kind])
    assert config.vision is not None
    tokens = tokens_per_picture(config.vision, config.d_model)
    given = getattr(transformers, f"{TILED[kind][0]}Config")(**{**PUBLISHED[kind], "tie_word_embeddings": False})
    with torch.device("meta"):
        theirs = getattr(transformers, f"{TILED[kind][0]}ForConditionalGeneration")(given)
    sizes = leaf_specs(dataclasses.replace(config, tie_embeddings=False))
    assert sum(math.prod(leaf.shape) for leaf in sizes.values()) == theirs.num_parameters()
    assert tokens == {"internvl": 256, "smolvlm": 64}[kind]


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_picture_is_one_tile_and_convert_says_so_once(checkpoint, tmp_path, kind, capsys):
    assert cli.main(["convert", str(checkpoint(kind)), str(tmp_path / "ours")]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "tiles" in line]
    assert said == [f"note: {kind}: its tiles are not made: a picture is one tile, the whole of it"]
    vision = ModelDirectory(tmp_path / "ours").config.vision
    assert vision is not None
    processing = vision.processing
    resample = {"internvl": "bicubic", "smolvlm": "lanczos"}[kind]
    assert (processing.size, processing.shortest, processing.resample) == ((SIDE, SIDE), None, resample)
    picture = np.random.default_rng(0).integers(0, 256, (SIDE * 3, SIDE * 3, 3), np.uint8)
    ours = pixels_of(picture, processing)
    processor = {"internvl": "GotOcr2ImageProcessorPil", "smolvlm": "SmolVLMImageProcessorPil"}[kind]
    keys = {**PROCESSORS[kind], "do_rescale": False, "do_normalize": False}
    if kind == "smolvlm":  # what it makes larger first, before the last tile is made, has the sides of the picture here
        keys["size"] = {"longest_edge": SIDE * 3}
    theirs = getattr(transformers, processor)(**keys)(Image.fromarray(picture))["pixel_values"]
    last = np.asarray(theirs)[0, -1] if kind == "smolvlm" else np.asarray(theirs)[0]
    np.testing.assert_array_equal(ours, np.moveaxis(last, 0, -1))


@pytest.mark.parametrize("kind", PROCESSORS)
def test_without_files_an_image_processor_is_written(checkpoint, tmp_path, kind):
    folder = changed(checkpoint(kind), tmp_path / "given", {})
    (folder / PREPROCESSOR).unlink()
    convert(folder, tmp_path / "ours", console=QUIET)
    export(ModelDirectory(tmp_path / "ours"), tmp_path / "back", console=QUIET)
    written = json.loads((tmp_path / "back" / PREPROCESSOR).read_text())
    assert written["image_processor_type"] == PROCESSORS[kind]["image_processor_type"]
    ours, back = (HuggingFaceDirectory(one).config.vision for one in (folder, tmp_path / "back"))
    assert ours is not None and back is not None and ours.processing == back.processing
    processor = getattr(transformers, f"{written['image_processor_type']}Pil").from_pretrained(tmp_path / "back")
    pixels = np.asarray(processor(Image.new("RGB", (SIDE, SIDE), (9, 200, 30)))["pixel_values"])
    assert pixels.shape[-2:] == (SIDE, SIDE)


@long
def test_upcycled_internvl_leaves_with_an_moe_inside(checkpoint, tmp_path):
    moe_jax.upcycle(str(checkpoint("internvl-normed")), tmp_path / "moe", experts=4, top_k=2)
    moe_jax.export(tmp_path / "moe", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["text_config"]["model_type"]) == ("internvl", "mixtral")
    loads_whole(tmp_path / "hf")


@pytest.mark.parametrize("side", [27, 32])
def test_the_positions_of_published_sizes_are_those_of_transformers(side):
    """It looks for them by rounded fractions of a side."""
    edges = torch.arange(1 / side, 1.0, 1 / side)
    places = torch.clamp(torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor([side])), max=1.0 - 1e-6)
    assert torch.bucketize(places, edges, right=True).tolist() == list(range(side))


REFUSED = {
    "ratio": ("internvl", {"downsample_ratio": 0.4}, "downsample_ratio"),
    "ratio of none": ("internvl", {"downsample_ratio": 0}, "downsample_ratio"),
    "squares": ("internvl", {"downsample_ratio": 1 / 3}, "4 x 4 patches"),
    "layers": ("internvl", {"vision_feature_layer": [1, 2]}, "vision_feature_layer"),
    "class token": ("internvl", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
    "activation": ("internvl", {"projector_hidden_act": "sin"}, "sin"),
    "norm": ("internvl", {"vision_config.norm_type": "batch_norm"}, "norm_type"),
    "sides": ("internvl", {"vision_config.image_size": [16, 20]}, "image_size"),
    "last norm": ("internvl-6b", {"vision_config.use_mean_pooling": False}, "use_mean_pooling"),
    "eps": ("internvl-6b", {"vision_config.layer_norm_eps": 1e-5}, "layer_norm_eps"),
    "positions": ("internvl", {"vision_config.use_absolute_position_embeddings": False}, "use_absolute_position"),
    "scale": ("smolvlm", {"scale_factor": 0}, "scale_factor"),
    "size": ("smolvlm", {"vision_config.image_size": 32}, "8 x 8 patches"),
    "unknown": ("smolvlm", {"use_tiles": True}, "use_tiles"),
    "unknown inside": ("smolvlm", {"text_config.sees_double": True}, "text_config.sees_double"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_configs(checkpoint, tmp_path, case):
    name, keys, named = REFUSED[case]
    with pytest.raises(InputError) as error:
        HuggingFaceDirectory(changed(checkpoint(name), tmp_path / "wrong", keys)).specs()
    assert named in str(error.value) and "\n" not in str(error.value)


UNWRITABLE = {
    "steps": ("smolvlm", {"projector": ("linear:unbiased",)}, "pixel_shuffle"),
    "bias": ("smolvlm", {"projector": ("pixel_shuffle:2", "linear")}, "linear:unbiased"),
    "state": ("smolvlm", {"features": (-2,)}, "features=[-2]"),
    "norm": ("internvl", {"projector": ("pixel_shuffle:2", "norm", "linear", "gelu", "linear")}, "norm:1e-05"),
    "states": ("internvl", {"features": (-2, -1)}, "features=[-2, -1]"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_a_model_that_the_format_cannot_hold(checkpoint, case):
    name, fields, named = UNWRITABLE[case]
    config = HuggingFaceDirectory(checkpoint(name)).config
    assert config.vision is not None
    with pytest.raises(InputError) as error:
        write_hf_config(dataclasses.replace(config, vision=dataclasses.replace(config.vision, **fields)))
    assert named in str(error.value) and "\n" not in str(error.value)


def test_a_language_model_whose_tensors_the_format_has_no_place_for(checkpoint):
    config = HuggingFaceDirectory(checkpoint("smolvlm")).config
    assert config.vision is not None
    with pytest.raises(InputError, match="transformer.wte"):
        vision_format_named("smolvlm").table(config.vision, (Row("transformer.wte.weight", "embed/embedding"),), ())
