"""What leaves with an exported model: a model card, settings for generation, and no path of this machine."""

import json

import numpy as np
import pytest

import moe_jax
from moe_jax.conversion.writing.model_card import model_card
from moe_jax.model_io.portable_lineage import without_places
from tests.support.dense_models import dense_config, random_leaves, write_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Hugging Face directory with a card of its own."""
    root = tmp_path_factory.mktemp("home") / "checkpoint"
    config = dense_config(num_layers=1, d_model=16, dim=32, eos_ids=(2,))
    moe_jax.export(write_model(root.with_name("dense"), config, random_leaves(config)), root)
    (root / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# A model\n")
    (root / "lineage.json").unlink()
    return root


def test_a_card_says_what_the_model_was_made_of(checkpoint, tmp_path):
    moe_jax.convert(checkpoint, tmp_path / "dense")
    moe_jax.upcycle(tmp_path / "dense", tmp_path / "moe", experts=3, top_k=2, every=1, step0_check=False)
    moe_jax.export(tmp_path / "moe", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "\nlicense: apache-2.0\n" in card
    assert "3 experts, of which a token uses 2" in card and "`checkpoint`; its licence is `apache-2.0`" in card
    for number, step in enumerate(("convert** of `checkpoint`", "upcycle** of `dense`", "export** of `moe`"), 1):
        assert f"\n{number}. **{step} (" in card
    for file in ("README.md", "lineage.json", "config.json"):
        assert str(tmp_path.parent.parent) not in (tmp_path / "out" / file).read_text()
    # The card that leaves is one that can be read again.
    moe_jax.convert(tmp_path / "out", tmp_path / "again")
    entry = json.loads((tmp_path / "again" / "lineage.json").read_text())[-1]
    assert entry["sources"][0]["license"] == "apache-2.0"


def test_settings_of_generation_leave_with_the_model(checkpoint):
    said = json.loads((checkpoint / "generation_config.json").read_text())
    known = json.loads((checkpoint / "config.json").read_text())
    assert said["eos_token_id"] == list(np.atleast_1d(known["eos_token_id"]))


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"base": "models/dense"}, {"base": "dense"}),
        ({"data.sources": [{"path": "/data/my texts/a.txt"}]}, {"data.sources": [{"path": "a.txt"}]}),
        ({"router_from": ["@/data/a.txt", "some words"]}, {"router_from": ["@a.txt", "some words"]}),
        ({"model.path": "runs/r1/model"}, {"model.path": "r1"}),
        ({"freeze": [".*/router/.*", "layers/(0|1)/mlp/.*"]}, {"freeze": [".*/router/.*", "layers/(0|1)/mlp/.*"]}),
        ({"warning": "no file in gs://bucket/a/b, nor ~/c/d"}, {"warning": "no file in b, nor d"}),
    ],
)
def test_places_become_names(options, left):
    entry = {"command": "x", "options": options, "sources": [{"path": "/home/someone/m", "fingerprint": "0"}]}
    assert without_places([entry]) == [
        {"command": "x", "options": left, "sources": [{"path": "m", "fingerprint": "0"}]}
    ]


def test_a_licence_that_is_none_is_not_written():
    """A lineage may come from anybody; what stands at the head of a card is read by other programs."""
    config = dense_config(num_layers=1, d_model=16, dim=32)
    entry = {"command": "convert", "sources": [{"path": "m", "fingerprint": "0", "license": "mit\nevil: true"}]}
    card = model_card(config, [entry], library="transformers").decode()
    assert "evil" not in card and "its licence is not recorded" in card
