"""Which experts tokens of pictures and of texts are given to: of a model whose experts prefer colours, just that."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from PIL import Image

import moe_jax
from moe_jax.api.expert_use import measure_expert_use
from moe_jax.commands import cli
from moe_jax.compression.calibration.calibration_rows import CalibrationRows
from moe_jax.distributed.sharding import make_mesh
from moe_jax.nn.projector import grid_of_tokens
from moe_jax.upcycling.dense_to_moe import upcycled_config
from tests.support.byte_tokenizer import EOS, byte_tokenizer
from tests.support.dense_models import dense_config, random_leaves, write_model
from tests.support.seeing_models import FEATURES, SIDE, seeing, vision_config
from tests.support.tiers import long

COLOURS = np.array([[220, 30, 30], [30, 200, 40], [40, 60, 230]], np.uint8)
# Of every patch of a picture the colour; experts are in another order.
PICTURE = np.array([[0, 0, 1], [2, 1, 1], [2, 2, 0]])
EXPERT_OF = np.array([2, 0, 1])
TEXT_EXPERT = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose first layer gives patches to experts by their colour, and texts to the last; pictures and rows.

    Features are the colours of patches: the tower's layers add nothing, and it knows no places.
    """
    folder = tmp_path_factory.mktemp("use")
    dense = dataclasses.replace(seeing(dense_config(num_layers=2, vocab_size=258, eos_ids=(EOS,))), max_positions=64)
    config = upcycled_config(dense, moe_jax.UpcycleSpec(experts=4, top_k=2, every=1))
    leaves = random_leaves(config)
    for path, leaf in leaves.items():
        adds = path.startswith("vision/tower/layers") and ("/o/" in path or "/down/" in path)
        if adds or path in ("vision/tower/patches/positions", "layers/0/attention/o/kernel"):
            leaves[path] = np.zeros_like(leaf)
    every = leaves["embed/embedding"]
    leaves["embed/embedding"] = every[:1] + 0.05 * every  # words are much alike
    # The router's kernel is fitted to its inputs, which depend on a token alone.
    model = moe_jax.load(write_model(folder / "any", config, leaves, ()))
    patches = np.repeat(COLOURS, FEATURES, axis=0).reshape(3, 1, 3, 3, 3)
    pixels = patches.repeat(SIDE // 3, axis=2).repeat(SIDE // 3, axis=3)
    slots = np.tile(np.arange(1, FEATURES + 1, dtype=np.int32), (3, 1))
    seen = model.decoder(np.zeros((3, FEATURES), np.int32), pixels=pixels, slots=slots, hidden_states=(0,))
    texts = model.decoder(np.arange(97, 123, dtype=np.int32)[None], hidden_states=(0,))
    inputs = np.concatenate([np.asarray(seen.hidden_states[0])[:, 0], np.asarray(texts.hidden_states[0])[0]])
    inputs /= np.sqrt(np.mean(inputs**2, axis=1, keepdims=True)) / leaves["layers/0/mlp_norm/scale"]
    wanted = np.eye(4)[np.append(EXPERT_OF, np.full(26, TEXT_EXPERT))]
    weights = np.append(np.full(3, 10.0), np.ones(26))[:, None]
    leaves["layers/0/mlp/router/kernel"] = np.linalg.lstsq(inputs * weights, wanted * weights)[0].astype(np.float32)
    tokenizer = byte_tokenizer(folder / "tokenizer.json")
    write_model(folder / "prefers", config, leaves, (tokenizer,))
    picture = COLOURS[PICTURE].repeat(SIDE // 3, axis=0).repeat(SIDE // 3, axis=1)
    Image.fromarray(picture).save(folder / "a.png")
    row = {"image": "a.png", "prompt": "<image>", "response": "abc"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"text": "only words"}) + "\n")
    return folder


@long
def test_experts_that_prefer_colours_are_shown_to(folder, capsys):
    words = ["inspect", folder / "prefers", "--plots", folder / "plots", "--text", folder / "rows.jsonl"]
    assert cli.main(list(map(str, words))) == 0, capsys.readouterr().err
    names = {file.name for file in (folder / "plots").iterdir()}
    assert {"experts_of_pictures_and_texts.png", "experts_of_patches_1.png", "expert_load.png"} <= names
    use = json.loads((folder / "plots" / "figures.json").read_text())["use"]
    assert use["tokens"]["of_pictures"] == FEATURES and use["tokens"]["of_text"] > 10
    first = np.array(use["layers"][0]["of_pictures"])
    assert first.sum() == 2 * FEATURES
    assert use["layers"][0]["of_text"][TEXT_EXPERT] > sum(use["layers"][0]["of_text"]) / 3


def test_patches_are_those_of_their_colours(folder):
    model, mesh = moe_jax.load(folder / "prefers"), make_mesh({}, jax.local_devices()[:1])
    assert grid_of_tokens(vision_config(), 16) == PICTURE.shape
    pixels = np.asarray(Image.open(folder / "a.png"))
    shape = (3, FEATURES + 3)
    slots = np.zeros(shape, np.int32)
    slots[0, 2 : 2 + FEATURES] = slots[2, :FEATURES] = np.arange(1, FEATURES + 1)
    rows = CalibrationRows(
        tokens=np.full(shape, 40, np.int32), targets=np.zeros(shape, np.int32), weights=np.ones(shape, np.float32),
        valid=np.arange(shape[1])[None] < np.array([[12], [5], [12]]), slots=slots, pictures=(1, 0, 1),
        pixels=(lambda: pixels[None], lambda: pixels[None, ::-1]),
    )  # fmt: skip
    use = measure_expert_use(model.decoder, rows, batch_size=2, mesh=mesh)
    assert [seen.experts[0].tolist() for seen in use.seen] == [
        EXPERT_OF[PICTURE].tolist(), EXPERT_OF[PICTURE[::-1]].tolist()
    ]  # fmt: skip
    assert use.tokens == (2 * FEATURES, 3 + 5 + 3)
    assert use.of_text[0].sum() == 2 * (3 + 5 + 3) and use.of_pictures[1].sum() == 4 * FEATURES


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text", "held-out.txt", "--samples", "3"], "--samples"),
        (["--text", "held-out.txt", "--image-folder", "x"], "--image-folder"),
        (["--text", "rows.jsonl", "--samples", "0"], "samples"),
    ],
)
def test_options_that_do_not_go_together(folder, capsys, words, said):
    assert cli.main(["inspect", str(folder / "prefers"), "--plots", str(folder / "none"), *words]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1 and said in err[0] and not (folder / "none").exists()
