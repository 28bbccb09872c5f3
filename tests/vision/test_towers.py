"""Towers against Transformers: converted, every hidden state, exported, and loaded there again."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from moe_jax.commands import cli
from moe_jax.conversion import HuggingFaceDirectory, convert, export
from moe_jax.files.tokenizer_files import PREPROCESSOR
from moe_jax.model_io.loading import load_tower
from moe_jax.model_io.model_dir import ModelDirectory
from tests.support.hf_checkpoints import assert_same_bits, read_tensors
from tests.support.tiers import one_in
from tests.support.vision_models import SHAPES, SMALL_EYE, TOWERS, made, random_tower, tower_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import save_file  # noqa: E402

QUIET = Console(quiet=True)
# What pools a picture (SigLIP), and stands for hidden patches in training (DINOv2): no feature passes them.
LEFT_OUT = ("head.", "embeddings.mask_token")
WITHIN = {"clip": ("CLIPConfig", "CLIPModel"), "siglip": ("SiglipConfig", "SiglipModel")}


def saved(model, folder: pathlib.Path) -> pathlib.Path:
    model.save_pretrained(folder)
    return folder


def pictures(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, height, width, 3)).astype(np.float32)


def check_hidden_states(model, source, sizes: list[tuple[int, int]]) -> None:
    """Every hidden state of Transformers, and the features after the final norm, within 2e-5 of the largest."""
    tower, layers = load_tower(source), source.config.num_layers
    run = nnx.jit(lambda tower, pixels: tower(pixels, hidden_states=range(layers + 1)))
    for size in sizes:
        with torch.no_grad():
            given = torch.tensor(np.moveaxis(pictures(*size), -1, 1))
            out = model(given, output_hidden_states=True)
        found = run(tower, jnp.asarray(pictures(*size)))
        expected = [state.numpy() for state in out.hidden_states]
        scale = max(np.abs(state).max() for state in expected)
        for index in range(layers):
            np.testing.assert_allclose(found.hidden_states[index], expected[index], atol=2e-5 * scale, rtol=0)
        last = out.last_hidden_state.numpy()
        np.testing.assert_allclose(found.x, last, atol=2e-5 * max(scale, np.abs(last).max()), rtol=0)


@one_in(8)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", TOWERS)
def test_converted_equal_and_back(name, shape, tmp_path):
    model = random_tower(name, shape)
    folder = saved(model, tmp_path / "theirs")
    (folder / PREPROCESSOR).write_text('{"do_resize": false}')  # goes along, whatever it says
    convert(folder, tmp_path / "ours", console=QUIET)
    source, side = ModelDirectory(tmp_path / "ours"), shape.patch * shape.side
    # These positions are interpolated for other sizes, also of sides that are no multiple of a patch.
    others = [(side + 2 * shape.patch + 1, side - shape.patch)] if name in ("dinov2", "internvl") else []
    check_hidden_states(model, source, [(side, side), *others])

    export(source, tmp_path / "back", console=QUIET)
    given = {key: value for key, value in read_tensors(folder).items() if not key.startswith(LEFT_OUT)}
    assert_same_bits(read_tensors(tmp_path / "back"), given)
    assert (tmp_path / "back" / PREPROCESSOR).read_bytes() == (folder / PREPROCESSOR).read_bytes()
    again, report = type(model).from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        both = [one.eval()(torch.tensor(np.moveaxis(pictures(side, side), -1, 1))) for one in (model, again)]
    np.testing.assert_allclose(both[0].last_hidden_state, both[1].last_hidden_state, atol=1e-5)


@one_in(2)
@pytest.mark.parametrize("name", WITHIN)
def test_the_tower_of_a_whole_model_and_older_names(name, tmp_path):
    """A file of `clip` or `siglip` holds a text encoder beside the tower, which stands below `vision_model`."""
    config, model = WITHIN[name]
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = getattr(transformers, config)(
        text_config={**text, "vocab_size": 40, "projection_size": 16},
        vision_config=tower_config(name, SMALL_EYE).to_dict(),
        projection_dim=16,
    )
    both = made(getattr(transformers, model)._from_config(whole, attn_implementation="eager"))
    source = HuggingFaceDirectory(saved(both, tmp_path / "whole"))
    assert source.config.family == f"{name}_vision_model"
    assert all(key.startswith(("vision_model.", "text_", "logit_", "visual_")) for key in source.checkpoint.tensors)
    side = SMALL_EYE.patch * SMALL_EYE.side
    check_hidden_states(both.vision_model, source, [(side, side)])

    alone = saved(both.vision_model, tmp_path / "alone")
    older = {f"vision_model.{key}": value for key, value in read_tensors(alone).items()}
    save_file(older, alone / "model.safetensors", {"format": "pt"})
    renamed = HuggingFaceDirectory(alone)
    for path in source.specs():
        np.testing.assert_array_equal(renamed.read(path), source.read(path), err_msg=path)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> pathlib.Path:
    return saved(random_tower("clip", SMALL_EYE), tmp_path_factory.mktemp("encoder") / "clip")


RECIPE = (
    '[model]\npath = "{}"\n[data]\nseq_len = 8\nsources = [{{ path = "{}" }}]\n[train]\nsteps = 1\nbatch_size = 8\n'
)


@pytest.mark.parametrize("verb", ["generate", "eval", "upcycle", "serve", "train", "adapt", "compress"])
def test_what_needs_a_language_model_refuses_an_encoder_in_one_line(verb, encoder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("words and words")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'run_dir = "{tmp_path}/run"\n' + RECIPE.format(encoder, text))
    words = {
        "generate": [encoder, "--ids", "1,2"],
        "eval": [encoder, "--text", text, "--seq-len", "8"],
        "upcycle": [encoder, tmp_path / "out", "--experts", "2"],
        "serve": [encoder],
        "train": [recipe],
        "adapt": [encoder, tmp_path / "out", "--method", "lora", "--targets", "q", "--adapter", "lora:2"],
        "compress": [encoder, tmp_path / "out", "--method", "ders-quantize", "--bits", "8"],
    }[verb]
    assert cli.main([verb, *map(str, words)]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "image encoder" in said[0], said
    assert not (tmp_path / "out").exists()


def test_inspect_and_a_dry_run_show_an_encoder(encoder, tmp_path, capsys):
    assert cli.main(["inspect", str(encoder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["family"] == "clip_vision_model"
    assert cli.main(["convert", str(encoder), str(tmp_path / "ours"), "--dry-run"]) == 0
    assert "patches/projection/kernel" in capsys.readouterr().out and not (tmp_path / "ours").exists()
